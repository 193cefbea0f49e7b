"""A checkpoint on disk or in a store, and the folder that holds a run's."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from horovod_runner import states
from horovod_runner.errors import CheckpointError
from horovod_runner.marker import Marker, is_name, marker_name
from horovod_runner.stores import PART, Folder, RemoteFolder

_SEEN: Final = ".seen-"
_READ_BYTES = 1 << 20
_STALE_SECONDS = 24 * 3600.0


class Checkpoint:
    """A complete checkpoint, as ``runner.last_run`` shows it.

    Attributes:
        step: as given to ``save_checkpoint``.
        metrics: as given to ``save_checkpoint``.
        size: of its file, in bytes.
        path: of its file: a path on this machine, or an URL.
        attempt: of the run, from 1 on.
        saved_at: seconds since the epoch.
    """

    def __init__(self, folder: Folder, marker: Marker) -> None:
        self._folder = folder
        self.marker = marker
        self.step = marker.step
        self.metrics = dict(marker.metrics)
        self.size = marker.size
        self.path = folder.path_of(marker.name)
        self.attempt = marker.attempt
        self.saved_at = marker.saved_at

    def __repr__(self) -> str:
        told = "".join(f", {name}={value:g}" for name, value in self.metrics.items())
        return f"Checkpoint(step={self.step}{told}, size={self.size}, path={self.path!r})"

    def load(self) -> Any:
        """The state, as it was given to ``save_checkpoint``; tensors are on the CPU.

        A folder comes as the path of a temporary one.

        Raises:
            CheckpointError: the file is gone, or is not what was written.
        """
        with whole_file(self._folder, self.marker) as path:
            return states.read(self.marker.kind, path)


def complete(folder: Folder) -> list[Marker]:
    """The complete checkpoints of a folder, the latest first."""
    names = set(folder.names())
    found = []
    for name in names:
        if is_name(name) and marker_name(name) in names:
            with suppress(FileNotFoundError, msgspec.DecodeError):  # gone, or somebody else's
                marker = msgspec.json.decode(folder.read(marker_name(name)), type=Marker)
                if marker.name == name and folder.size(name) == marker.size:
                    found.append(marker)
    # A rank that outlived its driver may have written a number that is there twice.
    return sorted(found, key=lambda marker: (marker.number, marker.saved_at), reverse=True)


def publish(folder: Folder, part: Path, marker: Marker) -> None:
    """Make a checkpoint of a file: from here on it counts."""
    folder.take(part, marker.name)
    try:
        told = msgspec.json.format(_json(marker), indent=1)
        folder.write(marker_name(marker.name), told)
    except BaseException:
        with suppress(Exception):
            folder.remove(marker.name)
        raise


def _json(marker: Marker) -> bytes:
    # JSON has no NaN: such a metric is left out of the file, as one that ranks nothing.
    known = {name: value for name, value in marker.metrics.items() if math.isfinite(value)}
    return msgspec.json.encode(msgspec.structs.replace(marker, metrics=known))


def remove(folder: Folder, marker: Marker) -> None:
    """Remove a checkpoint; the marker goes first."""
    folder.remove(marker_name(marker.name))
    folder.remove(marker.name)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(buffer[:count])
    return found.hexdigest()


def check(path: Path, marker: Marker) -> None:
    """See to it that a file is what was written.

    Raises:
        CheckpointError: it is not, or is gone.
    """
    try:
        size = path.stat().st_size
        whole = size == marker.size and digest(path) == marker.sha256
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint {marker.name} (step {marker.step}) is gone: {path} does not exist any "
            "more. Retention removes old ones (keep), and without a checkpoint_dir they last as "
            "long as the run's result."
        ) from None
    if not whole:
        raise CheckpointError(
            f"the checkpoint {marker.name} (step {marker.step}) is damaged: {size} bytes with "
            f"another SHA-256 than the {marker.size} bytes that were written. The disk or the "
            "store has changed it."
        )


@contextmanager
def whole_file(folder: Folder, marker: Marker, scratch: Path | None = None) -> Iterator[Path]:
    """A checkpoint's file on this machine, checked.

    Args:
        folder: where it is.
        marker: which.
        scratch: where to copy it if it is in a store; None for a temporary folder.

    Raises:
        CheckpointError: it is gone or damaged.
    """
    path = folder.local(marker.name)
    if path is not None:
        check(path, marker)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=scratch) as temporary:
        path = Path(temporary) / marker.name
        with suppress(FileNotFoundError):
            folder.fetch(marker.name, path)
        check(path, marker)
        yield path


def show(folder: Folder, token: str) -> None:
    """Leave a sign in a folder, by which others can tell whether they see the same one."""
    folder.write(f"{_SEEN}{token}", b"")


def is_seen(folder: Folder, token: str) -> bool:
    """Whether this is the folder in which the driver left a sign; a store is the same for all."""
    return isinstance(folder, RemoteFolder) or folder.size(f"{_SEEN}{token}") is not None


def tidy(folder: Folder, token: str, *, signs: bool = True, alone: bool = False) -> None:
    """Remove a run's signs and unfinished files, and what crashed runs left long ago.

    Args:
        folder: where.
        token: the run's.
        signs: whether its signs go, too.
        alone: no other run is using the folder: what crashed runs left goes at once.
    """
    kinds = (PART, _SEEN) if signs else (PART,)
    names = set(folder.names())
    for name in names:
        ours = name.startswith(kinds) and token in name
        old = alone or folder.age(name) > _STALE_SECONDS
        left = name.startswith((PART, _SEEN)) and old
        # Without a marker: cut off between the two.
        unmarked = is_name(name) and marker_name(name) not in names
        unmarked = unmarked and (old or f"-{token}." in name)
        if ours or left or unmarked:
            with suppress(OSError):
                folder.remove(name)
