"""Divides a state among the ranks, copies this rank's part, and writes it to a file.

torch.distributed.checkpoint's planner decides: a rank writes its shards of tensors, and one of the
ranks what all have. The ranks exchange their plans only if these have changed.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from horovod_runner.checkpoints.sharded import metadata as metadata_
from horovod_runner.checkpoints.sharded.parts_store import PartsStore
from horovod_runner.checkpoints.sharded.tree import Shape, flatten, merge
from horovod_runner.checkpoints.snapshot import map_state
from horovod_runner.common.limits import Limits
from horovod_runner.common.text import count_text, names_text, ranks_text
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.folder import PART, Folder
from horovod_runner.host.folders.problems import describe
from horovod_runner.wire import collectives
from horovod_runner.wire.collectives import ALONE
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import METADATA, marker_name

_DIGEST_BYTES: Final = 8
_SUFFIX: Final = ".distcp"
# What a rank tells: the position, size and SHA-256 of each piece; or why there is none.
_Report = str | list[tuple[int, int, bytes]]
_decode_report: Final = msgspec.msgpack.Decoder[_Report](_Report).decode


class _Division(NamedTuple):
    """Who writes what of a state."""

    plans: Sequence[SavePlan]  # of the ranks
    metadata: Metadata
    shape: Shape


class Sharder:
    """Takes parts of states, one at a time. All ranks make the same calls.

    Raises:
        CheckpointError: a rank does not see the folder of checkpoints, see ``sees``.
        RuntimeError: the ranks are not connected yet.
    """

    def __init__(
        self, plan: CheckpointPlan, rank: int, size: int, limits: Limits, *, sees: bool
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._ranks = ALONE
        self._store: PartsStore | None = None
        if size > 1:
            self._ranks = collectives.connected("save_checkpoint(sharded=True) divides the state")
        self._check_folder(sees)
        if size > 1:
            self._store = PartsStore(rank, self._ranks, limits.checkpoint_meeting)
        self._digests: list[int] = []
        self._division: _Division | None = None
        self._buffers: dict[MetadataIndex, Any] = {}

    def _check_folder(self, sees: bool) -> None:
        blind = [rank for rank, (own,) in enumerate(self._ranks.gather([sees])) if not own]
        if blind:
            raise CheckpointError(
                f"sharded=True: {ranks_text(blind)} cannot see the folder of checkpoints, "
                f"{self._plan.folder}, to which each rank writes its part. Set "
                "checkpoint_dir to a folder that the driver and all hosts share, or to a URL "
                "(s3://...); or leave out sharded=True, and gather the state on rank 0."
            )

    def take(self, state: Any, number: int, step: int) -> OwnPart:
        """Copy this rank's part of a state. This overwrites the previous one: write that first.

        Raises:
            CheckpointError: the ranks save different checkpoints.
            TypeError: the state is not a dict, or holds a value that cannot be stored.
            ValueError: the ranks' parts of a tensor do not fit together.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"with sharded=True the state is a dict, not {type(state).__qualname__}: leave out "
                "sharded=True, or give a dict"
            )
        kept, _ = map_state(state, _same, _same, sharded=True)
        values, _, shape = flatten(kept)
        _check_leaves(values)
        # Without its own flattening, which takes keys that are numbers for text.
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(values, is_coordinator=self._rank == 0)
        local = pickle.dumps((planner.create_local_plan(), shape))
        division = self._divide(local, planner, number, step)
        try:
            copies = self._copies(planner, division)
        except Exception as error:  # main may go on, and rank 0 waits for this rank's part
            if self._rank and self._store is not None:
                with suppress(RuntimeError):
                    self._store.tell(number, self._rank, msgspec.msgpack.encode(describe(error)))
            raise
        return OwnPart(self._rank, self._plan.attempt, number, copies, division, self._store)

    def _copies(self, planner: DefaultSavePlanner, division: _Division) -> list[Any]:
        own = planner.finish_plan(division.plans[self._rank])
        copies = [self._copy(item.index, planner.resolve_data(item)) for item in own.items]
        for index in self._buffers.keys() - {item.index for item in own.items}:
            del self._buffers[index]
        return copies

    def _divide(
        self, local: bytes, planner: DefaultSavePlanner, number: int, step: int
    ) -> _Division:
        digest = hashlib.blake2b(local, digest_size=_DIGEST_BYTES).digest()
        ours = [number, step, int.from_bytes(digest, "little", signed=True)]
        gathered = self._ranks.gather(ours)
        for rank, other in enumerate(gathered):
            if other[:2] != gathered[0][:2]:
                texts = [f"number {each[0]} of step {each[1]}" for each in (gathered[0], other)]
                raise CheckpointError(
                    f"rank 0 saves the checkpoint {texts[0]}, and rank {rank} the checkpoint "
                    f"{texts[1]}. Call save_checkpoint on all ranks in the same order, with the "
                    "same step."
                )
        digests = [other[2] for other in gathered]
        if self._division is None or digests != self._digests:
            # Every rank computes the same, so that nothing needs to be sent back.
            plans, shapes = zip(*map(metadata_.unpickle, self._exchange(local)), strict=True)
            divided, metadata = planner.create_global_plan(list(plans))
            self._division, self._digests = _Division(divided, metadata, merge(shapes)), digests
        return self._division

    def _exchange(self, data: bytes) -> list[bytes]:
        counts = self._ranks.gather([len(data)])
        return [
            self._ranks.broadcast(data if root == self._rank else b"", count, root)
            for root, (count,) in enumerate(counts)
        ]

    def _copy(self, index: MetadataIndex, value: Any) -> Any:
        if isinstance(value, io.BytesIO):
            return value
        tensor = value.detach()
        buffer = self._buffers.get(index)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[index] = buffer
        return buffer.copy_(tensor)


def _same(value: Any, _where: str) -> Any:
    return value


def _check_leaves(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, tuple) and any(hasattr(item, "full_tensor") for item in value):
            raise TypeError(
                f"{name!r} of the state is a tuple with one rank's part of a tensor: make it a list"
            )


@dataclass
class OwnPart:
    """What one rank writes of a checkpoint, into a folder of checkpoints."""

    rank: int
    attempt: int  # 1-based number of the launch within the run
    number: int  # the checkpoint's
    copies: Sequence[Any]  # of its values: tensors, and files of torch.save in memory
    division: _Division
    store: PartsStore | None  # leads to rank 0; None for a single rank
    _report: _Report = field(default_factory=list, init=False)

    def write(self, folder: Folder, name: str, scratch: Callable[[], Path]) -> None:
        """Write this rank's file, and tell rank 0; also if it cannot be written.

        In ``scratch()`` a file is made for a remote folder.
        """
        try:
            if self.copies:
                self._report = self._write(folder.inside(name), scratch)
        except Exception as error:
            self._report = describe(error, folder=folder.local(""))
        if self.rank and self.store is not None:
            with suppress(RuntimeError):  # rank 0 is gone, and with it the run
                self.store.tell(self.number, self.rank, msgspec.msgpack.encode(self._report))

    def _write(self, folder: Folder, scratch: Callable[[], Path]) -> _Report:
        name = _file(self.rank, self.attempt)
        local = folder.local(name)
        if local is not None:
            local.parent.mkdir(exist_ok=True)
        part = (scratch() if local is None else local.parent) / f"{PART}{name}"
        try:
            with part.open("wb") as file:
                pieces = [_write_value(value, file) for value in self.copies]
            folder.move_in(part, name)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        return pieces

    def complete(self, folder: Folder, name: str) -> tuple[int, str]:
        """On rank 0: wait for the other ranks, and write the checkpoint's metadata.

        Returns:
            The size of all files in bytes, and the SHA-256 of the metadata in hexadecimal.

        Raises:
            CheckpointError: a rank could not write its part, or another attempt has written this
                checkpoint, or another program has removed a part of it.
        """
        reports: list[_Report] = [self._report]
        if self.store is not None:
            for rank in range(1, len(self.division.plans)):
                data = self.store.hear(self.number, rank)
                reports.append(_decode_report(data))
        pieces = {}
        problems = []
        for rank, report in enumerate(reports):
            if isinstance(report, str):
                problems.append(f"rank {rank}: {report}")
                continue
            items = self.division.plans[rank].items
            for item, piece in zip(items, report, strict=True):
                pieces[item.index] = metadata_.StoredPiece(_file(rank, self.attempt), *piece)
        if problems:
            others = len(problems) - 1
            more = f" {count_text(others, 'other rank')} could not write theirs." if others else ""
            raise CheckpointError(f"{problems[0]}{more}")
        data = metadata_.write(self.division.metadata, pieces, self.division.shape)
        if folder.size(marker_name(name)) is not None:  # this rank has outlived its attempt
            raise CheckpointError("another attempt has written it already")
        local = folder.local(name)
        if local is not None:
            local.mkdir(exist_ok=True)
        inside = folder.inside(name)
        inside.write(METADATA, data)
        _check_there(inside, {piece.file for piece in pieces.values()})
        size = sum(piece.length for piece in pieces.values()) + len(data)
        return size, hashlib.sha256(data).hexdigest()

    def discard(self, folder: Folder, name: str) -> None:
        """On rank 0: remove this attempt's files; all, if no other attempt writes there."""
        inside = folder.inside(name)
        parts = [file for file in inside.names() if file.endswith(_SUFFIX)]
        own = {_file(rank, self.attempt) for rank in range(len(self.division.plans))}
        if own.issuperset(parts):
            folder.remove_inside(name)
            return
        for file in own.intersection(parts):
            inside.remove(file)


def _check_there(folder: Folder, files: set[str]) -> None:
    """Check that all files are there, which may be long after the ranks have written them."""
    # One request of a store. A list from NFS may be old, so that it proves no absence.
    left = files.difference(folder.names())
    missing = sorted(file for file in left if folder.size(file) is None)
    if missing:
        raise CheckpointError(
            f"{names_text('file', missing)} disappeared after the ranks had written all. Another "
            "program cleans up in this folder, or a run of an older horovod_runner resumes in it: "
            "give the run its own checkpoint_dir."
        )


def _file(rank: int, attempt: int) -> str:
    # With the attempt: a rank that outlived its own must not replace a file of the next one.
    return f"__{rank}_{attempt}{_SUFFIX}"


def _write_value(value: Any, file: BinaryIO) -> tuple[int, int, bytes]:
    """Append a value to a file; returns its position, size and SHA-256."""
    stream = _Measured(file)
    try:
        if isinstance(value, io.BytesIO):
            stream.write(value.getbuffer())
        else:
            torch.save(value, stream)
    except RuntimeError as error:  # torch's does not say what the system said
        raise stream.error or error from error
    return file.tell() - stream.count, stream.count, stream.digest.digest()


class _Measured(io.RawIOBase):
    """Passes on what is written, and measures it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        """See :class:`io.RawIOBase`; so for all below."""
        return True

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.count += written
        return written
