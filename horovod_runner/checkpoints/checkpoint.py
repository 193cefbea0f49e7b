"""Checkpoints in a folder: listed, completed by their marker, verified and cleaned up."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from horovod_runner.checkpoints import formats, owner
from horovod_runner.checkpoints.problems import damaged, unreachable
from horovod_runner.common.files import file_sha256
from horovod_runner.common.text import HIDDEN, without_password
from horovod_runner.errors import CheckpointError, forget_passwords
from horovod_runner.host.folders.folder import PART, Folder
from horovod_runner.host.folders.local import fresh
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.remote import RemoteFolder
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.wire.marker import (
    METADATA,
    SUFFIXES,
    Marker,
    decode_marker,
    is_name,
    marker_name,
)

_PROBE: Final = ".seen-"
#: Begins the names of a journal's files (driver/detached/journal.py).
LIVE: Final = ".live-"
_STALE_SECONDS = 24 * 3600.0


class Checkpoint:
    """A complete checkpoint, as in ``runner.last_run.checkpoints``.

    Attributes:
        step: as given to ``save_checkpoint``.
        metrics: as given to ``save_checkpoint``.
        size: of its files, in bytes.
        path: of its file, or its folder if it is sharded: on the driver's machine, or a URL.
        folder: in which it is.
        attempt: 1-based number of the launch, within the run, that saved it.
        saved_at: seconds since the Unix epoch.
    """

    def __init__(self, folder: Folder | str, marker: Marker) -> None:
        # The folder of one in a record is a path or URL, opened when the checkpoint is loaded.
        self._folder = folder
        self.marker = marker
        self.step = marker.step
        self.metrics = dict(marker.metrics)
        self.size = marker.size
        if isinstance(folder, str):
            self.folder, self.path = folder, os.path.join(folder, marker.name)
        else:
            self.folder, self.path = folder.path_of(""), folder.path_of(marker.name)
        self.attempt = marker.attempt
        self.saved_at = marker.saved_at

    def __repr__(self) -> str:
        metrics = "".join(f", {name}={value:g}" for name, value in self.metrics.items())
        path = without_password(repr(self.path))
        return f"Checkpoint(step={self.step}{metrics}, size={self.size}, path={path})"

    def load(self) -> Any:
        """Read the state that was given to ``save_checkpoint``.

        Returns:
            The state: tensors are on the CPU, and whole if the checkpoint is sharded; a folder is
            the path of a temporary copy, which is removed at the end of this process.

        Raises:
            CheckpointError: the file is gone or damaged, its folder cannot be reached, or its
                framework is not installed.
        """
        try:
            return self._load()
        except CheckpointError as error:
            forget_passwords(error)
            raise

    def _load(self) -> Any:
        folder = self._folder
        if isinstance(folder, str):
            if HIDDEN in folder:
                raise CheckpointError(
                    f"the checkpoint {self.marker.name} (step {self.marker.step}) is in {folder}, "
                    "and records hold no passwords: resume from it with checkpoint_dir=<the whole "
                    "URL>, resume=True. Or leave passwords out of URLs: stores read them from "
                    "variables or files."
                )
            folder = open_folder(folder)
        if self.marker.kind == "sharded":
            try:
                from horovod_runner.checkpoints.sharded import reader
            except ImportError as error:
                raise CheckpointError(
                    f"the checkpoint {self.marker.name} is sharded, and cannot be read here: "
                    f"{error}. Install torch."
                ) from error
            return reader.load(folder, self.marker)
        with intact_file(folder, self.marker) as path:
            return formats.read(self.marker.kind, path)


def find_complete(folder: Folder) -> list[Marker]:
    """The markers of all complete checkpoints in a folder, latest first."""
    names = set(folder.names())
    markers = []
    for name in names:
        if is_name(name) and marker_name(name) in names:
            # Removed meanwhile, or written by another program:
            with suppress(FileNotFoundError, msgspec.DecodeError):
                marker = decode_marker(folder.read(marker_name(name)))
                if marker.name == name and _is_there(folder, marker):
                    markers.append(marker)
    # A rank that outlived its driver may have used a number that the next run used, too.
    return sorted(markers, key=lambda marker: (marker.number, marker.saved_at), reverse=True)


def _is_there(folder: Folder, marker: Marker) -> bool:
    if marker.kind == "sharded":  # the files of the ranks are verified when they are read
        return folder.inside(marker.name).size(METADATA) is not None
    return folder.size(marker.name) == marker.size


def publish(folder: Folder, part: Path | None, marker: Marker, *, owned: bool = False) -> None:
    """Move a finished file into the folder, if it is not there yet, and complete it by its marker.

    Raises:
        CheckpointError: it must be ``owned`` by the run, and another one has taken it over.
    """
    if owned:
        _check_owner(folder, marker)
    if part is not None:
        folder.move_in(part, marker.name)
    try:
        # JSON has no NaN. Such a metric is left out: for the ranking it counts as missing anyway.
        finite = {name: value for name, value in marker.metrics.items() if math.isfinite(value)}
        text = msgspec.json.encode(msgspec.structs.replace(marker, metrics=finite))
        folder.write(marker_name(marker.name), msgspec.json.format(text, indent=1))
        if owned:
            # Again: the other run removes files that have no marker, perhaps a moment ago.
            _check_owner(folder, marker)
    except BaseException:
        with suppress(Exception):
            remove(folder, marker)
        raise


def _check_owner(folder: Folder, marker: Marker) -> None:
    if problem := owner.taken_from(folder, marker.run_id):
        raise CheckpointError(problem)


def remove(folder: Folder, marker: Marker) -> None:
    """Remove a checkpoint, its marker first."""
    folder.remove(marker_name(marker.name))
    discard(folder, marker.name)


def discard(folder: Folder, name: str) -> None:
    """Remove a checkpoint's file, or the folder of a sharded one."""
    if is_name(name) and name.endswith(SUFFIXES["sharded"]):
        folder.remove_inside(name)
    else:
        folder.remove(name)


def verify(path: Path, marker: Marker) -> None:
    """Check that a file has the size and SHA-256 of its marker.

    Raises:
        CheckpointError: it has not, or does not exist.
        UnreachableError: it cannot be read.
    """
    check_size(path, marker)
    try:
        digest = fresh(lambda: file_sha256(path))
    except OSError as error:
        raise _unreadable(path, marker, error) from error
    check_digest(digest, marker)


def check_size(path: Path, marker: Marker) -> None:
    """Check that a file has the size of its marker; raises as :func:`verify`."""
    try:
        size = fresh(path.stat).st_size
    except OSError as error:
        raise _unreadable(path, marker, error) from error
    if size != marker.size:
        raise damaged(marker, f"{size} bytes instead of {marker.size}")


def check_digest(sha256: str, marker: Marker) -> None:
    """Check that a file with the size of its marker has its SHA-256; raises CheckpointError."""
    if sha256 != marker.sha256:
        raise damaged(marker, f"its {marker.size} bytes have another SHA-256 than were written")


def _unreadable(path: Path, marker: Marker, error: OSError) -> CheckpointError:
    if not isinstance(error, FileNotFoundError):
        return unreachable(marker, error)
    return CheckpointError(
        f"the checkpoint {marker.name} (step {marker.step}) is gone: {path} no longer exists. "
        "Retention removes old ones: raise num_to_keep (CheckpointConfig). Without a "
        "checkpoint_dir, checkpoints exist only as long as the run's result: set one."
    )


@contextmanager
def intact_file(folder: Folder, marker: Marker) -> Iterator[Path]:
    """A checkpoint's file on this machine, verified; a temporary copy if its folder is remote.

    Raises:
        CheckpointError: the file is gone or damaged.
        UnreachableError: it cannot be read.
    """
    path = folder.local(marker.name)
    if path is not None:
        verify(path, marker)
        yield path
        return
    with temporary_folder("checkpoint") as temporary:
        path = Path(temporary) / marker.name
        try:
            with suppress(FileNotFoundError):
                folder.copy_out(marker.name, path)
        except Exception as error:  # every kind of folder raises different ones
            raise unreachable(marker, error) from error
        verify(path, marker)
        yield path


def write_probe(folder: Folder, token: str) -> None:
    """Write an empty file by which other hosts detect whether they see the same folder."""
    folder.write(f"{_PROBE}{token}", b"")


def has_probe(folder: Folder, token: str) -> bool:
    """Whether this host sees the folder in which the driver wrote a probe file.

    All hosts see the same remote folder, so it needs no probe.
    """
    return isinstance(folder, RemoteFolder) or folder.size(f"{_PROBE}{token}") is not None


def clean_up(folder: Folder, token: str, *, probes: bool = True, before: str = "") -> None:
    """Remove a run's probe, journal and unfinished files, and those of runs that crashed a day ago.

    If this run has taken the folder over from the run ``before``, the unfinished files of that run
    are removed at any age.
    """
    prefixes = (PART, LIVE, _PROBE) if probes else (PART, LIVE)
    names = set(folder.names())
    for name in names:
        ours = name.startswith(prefixes) and token in name
        old = folder.age(name) > _STALE_SECONDS
        abandoned = name.startswith((PART, _PROBE, LIVE)) and old and token not in name
        # Not its probe: if it still runs, its ranks should say that the folder was taken over, and
        # not that they do not see it.
        theirs = bool(before) and f"-{before}." in name
        # A crash between the file and its marker leaves a file without one.
        unmarked = is_name(name) and marker_name(name) not in names
        unmarked = unmarked and (old or theirs or f"-{token}." in name)
        if ours or abandoned or unmarked or (theirs and name.startswith(PART)):
            with suppress(OSError):
                discard(folder, name)
