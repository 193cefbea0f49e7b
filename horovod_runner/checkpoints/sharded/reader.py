"""Reads sharded checkpoints: whole, or the parts that the tensors of a given state need.

Every piece is verified when it is read. Reading runs no code.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from horovod_runner.checkpoints import formats
from horovod_runner.checkpoints.problems import damaged, unreachable
from horovod_runner.checkpoints.sharded import metadata as metadata_
from horovod_runner.checkpoints.sharded.metadata import StoredPiece
from horovod_runner.checkpoints.sharded.tree import Leaves, flatten, unflatten
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.folder import Folder
from horovod_runner.wire.marker import METADATA, Marker

_FILE: Final = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_MOST_BYTES: Final = 64 << 20  # that are read at once
_GAP_BYTES: Final = 1 << 20  # that are read rather than left out


class MisfitError(CheckpointError):
    """The state that is to be loaded into has other values than the checkpoint."""


def read_metadata(folder: Folder, marker: Marker) -> bytes:
    """Read a checkpoint's metadata, and verify them.

    Raises:
        CheckpointError: they are gone or damaged.
        UnreachableError: they cannot be read.
    """
    data = _reading(lambda: folder.inside(marker.name).read(METADATA), marker, METADATA)
    if hashlib.sha256(data).hexdigest() != marker.sha256:
        raise _damaged(marker, METADATA)
    return data


def load(folder: Folder, marker: Marker, into: Mapping[str, Any] | None = None) -> Any:
    """Load a checkpoint into a state: tensors are overwritten, and other values are replaced.

    Returns:
        The state. Where none is given, it is a new one, with whole tensors on the CPU.

    Raises:
        CheckpointError: a file is gone or damaged.
        MisfitError: ``into`` has a value that the checkpoint lacks, or of another shape.
        UnreachableError: a file cannot be read.
    """
    metadata, pieces, shape = metadata_.read(read_metadata(folder, marker), marker.name)
    if into is None:
        values = {name: _empty(each) for name, each in metadata.state_dict_metadata.items()}
        leaves = Leaves(values, {}, shape)
    else:
        leaves = flatten(into)

    def read(items: Iterable[ReadItem]) -> Iterator[tuple[ReadItem, Any]]:
        wanted = [(pieces[item.storage_index], item) for item in items]
        for item, piece in _read_pieces(folder.inside(marker.name), marker, wanted):
            with formats.numpy_allowed(torch):
                yield item, torch.load(io.BytesIO(piece), map_location="cpu", weights_only=True)

    values = _fill(leaves, metadata, read, marker.step)
    return unflatten(values, shape) if into is None else into


def fill(into: Mapping[str, Any], state: Any, step: int) -> None:
    """Copy a whole state in memory, that of a step, into another, which may be sharded.

    Raises:
        MisfitError: ``into`` has a value that the state lacks, or of another shape.
    """
    if not isinstance(state, Mapping):
        raise MisfitError(
            f"load_checkpoint(into=...): the checkpoint of step {step} must be a dict, got "
            f"{type(state).__name__}. Call load_checkpoint() without into."
        )
    whole = flatten(state).values
    plan = create_default_local_save_plan(whole, is_coordinator=True)
    _, metadata = create_default_global_save_plan([plan])

    def read(items: Iterable[ReadItem]) -> Iterator[tuple[ReadItem, Any]]:
        for item in items:
            yield item, whole[item.storage_index.fqn]

    _fill(flatten(into), metadata, read, step)


def _empty(stored: Any) -> Any:
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return None


def _fill(
    leaves: Leaves,
    metadata: Metadata,
    read: Callable[[Iterable[ReadItem]], Iterator[tuple[ReadItem, Any]]],
    step: int,
) -> dict[str, Any]:
    """Read the leaves of a state: into its tensors, and in place of its other values."""
    missing = sorted(leaves.values.keys() - metadata.state_dict_metadata.keys())
    if missing:
        raise MisfitError(
            f"the checkpoint of step {step} lacks {len(missing)} values that into= has: "
            f"{', '.join(missing[:3])}. It has {_some(metadata.state_dict_metadata)}. Give a state "
            "with the same keys as the one that was saved, or a part of them."
        )
    _check_empty(leaves, metadata, step)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    values = dict(leaves.values)
    planner.set_up_planner(values, metadata)
    try:
        items = planner.create_local_plan().items
    except (RuntimeError, ValueError) as error:
        raise MisfitError(
            f"the checkpoint of step {step} does not fit the state that into= gives: {error}. "
            "Build the model and the optimizer with the sizes of the run that saved it."
        ) from error
    for item, value in read(items):
        if item.type == LoadItemType.BYTE_IO:
            values[item.dest_index.fqn] = value
            continue
        for dimension, (at, count) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            value = value.narrow(dimension, at, count)  # noqa: PLW2901
        planner.resolve_tensor(item).detach().copy_(value)
    for name, (container, key) in leaves.homes.items():
        if values[name] is not leaves.values[name]:
            container[key] = values[name]
    return values


def _check_empty(leaves: Leaves, metadata: Metadata, step: int) -> None:
    """Refuse an empty dict for values that the checkpoint has: none of them would be loaded."""
    for name in (".".join(map(str, path)) for path in leaves.shape.empty if path):
        values = [each for each in metadata.state_dict_metadata if each.startswith(f"{name}.")]
        if values:
            raise MisfitError(
                f"into= has an empty dict at {name!r}, where the checkpoint of step {step} has "
                f"{len(values)} values. An optimizer that has made no step has no state yet: give "
                "get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict. Or "
                "leave that key out, and its values are not loaded."
            )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _read_pieces(
    folder: Folder, marker: Marker, wanted: Iterable[tuple[StoredPiece, ReadItem]]
) -> Iterator[tuple[ReadItem, memoryview]]:
    """Read pieces of files: those that lie side by side at once, for stores answer slowly."""
    ordered = sorted(wanted, key=lambda each: each[0][:2])
    for file, of_file in groupby(ordered, key=lambda each: each[0].file):
        if _FILE.fullmatch(file) is None:
            raise _damaged(marker, file)
        for begin, end, pieces in _spans(of_file):
            data = memoryview(
                _reading(lambda: folder.read_range(file, begin, end - begin), marker, file)  # noqa: B023
            )
            for (_, at, count, sha256), item in pieces:
                piece = data[at - begin : at - begin + count]
                if hashlib.sha256(piece).digest() != sha256:
                    raise _damaged(marker, file)
                yield item, piece


def _spans(
    pieces: Iterable[tuple[StoredPiece, ReadItem]],
) -> Iterator[tuple[int, int, list[tuple[StoredPiece, ReadItem]]]]:
    """Group the pieces of a file, in their order, into spans that are read at once."""
    group: list[tuple[StoredPiece, ReadItem]] = []
    begin = end = 0
    for piece, item in pieces:
        stop = piece.at + piece.length
        if group and (piece.at > end + _GAP_BYTES or stop > begin + _MOST_BYTES):
            yield begin, end, group
            group = []
        if not group:
            begin = end = piece.at
        group.append((piece, item))
        end = max(end, stop)
    if group:
        yield begin, end, group


def _reading(read: Callable[[], bytes], marker: Marker, file: str) -> bytes:
    try:
        return read()
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint {marker.name} (step {marker.step}) is incomplete: its file {file} no "
            "longer exists. Retention removes old checkpoints: raise num_to_keep "
            "(CheckpointConfig), or use another one."
        ) from None
    except Exception as error:  # every kind of folder raises different ones
        raise unreachable(marker, error) from error


def _damaged(marker: Marker, file: str) -> CheckpointError:
    return damaged(marker, f"its file {file} has other bytes than were written")
