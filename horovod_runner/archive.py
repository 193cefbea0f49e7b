"""The driver's side of checkpoints: where they are kept, what is there, what to go on from.

A rank that sees the folder writes there itself; from one that does not the pieces come over the
channel, and are put together here.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from horovod_runner import checkpoint, stores
from horovod_runner.checkpoint import Checkpoint
from horovod_runner.errors import CheckpointError
from horovod_runner.folder import RunFolder
from horovod_runner.handover import CheckpointPlan
from horovod_runner.marker import Marker, Mode, file_name, is_name, ranked, surplus
from horovod_runner.messages import Fetch, Fetched, FilePart
from horovod_runner.stores import LocalFolder

_PIECE_BYTES = 4 << 20


class Archive:
    """One run's checkpoints, and its timeline; enter it for the time of the run.

    Args:
        run_id: the run's.
        url: as HorovodRunner's ``checkpoint_dir``; None keeps them in a temporary folder.
        keep, best, mode, resume: as given to HorovodRunner.
        timeline: where Horovod's timeline goes, if anywhere.

    Attributes:
        markers: the checkpoints, the latest first.

    Raises:
        CheckpointError: the folder cannot be made, written to or listed.
    """

    def __init__(
        self,
        run_id: str,
        url: str | None = None,
        *,
        keep: int | None = None,
        best: str | None = None,
        mode: Mode = "min",
        resume: bool = False,
        timeline: Path | None = None,
    ) -> None:
        self._run_id = run_id
        self._url = url
        self._keep, self._best, self._mode = keep, best, mode
        self._resume = resume
        self._timeline = timeline
        self._kept = ExitStack()
        self._writing: tuple[str, BinaryIO] | None = None
        self._reading: tuple[str, BinaryIO] | None = None
        self._said_unranked = False
        self.markers: list[Marker] = []

    def __enter__(self) -> Archive:
        if self._url is None:
            own = RunFolder(f"{self._run_id}-checkpoints")
            self._folder: stores.Folder = LocalFolder(self._kept.enter_context(own).path)
        else:
            self._folder = stores.open_folder(self._url)
        try:
            local = self._folder.local("")
            if local is not None:
                if local.exists() and not local.is_dir():
                    raise NotADirectoryError("it is a file; name a folder")
                local.mkdir(parents=True, exist_ok=True)
                self._folder = LocalFolder(local.absolute())
            found = checkpoint.complete(self._folder)
            if local is not None:
                checkpoint.tidy(self._folder, self._run_id, alone=self._resume)
                checkpoint.show(self._folder, self._run_id)
        except Exception as error:  # each store has errors of its own
            self._kept.close()
            raise CheckpointError(
                f"checkpoint_dir={self._folder.url!r} cannot be used: {error}. The driver lists "
                "it and the ranks write to it: look at its name, permissions and credentials."
            ) from error
        self._number = max((marker.number for marker in found), default=0)
        self.markers = found if self._resume else []
        return self

    def __exit__(self, *_: object) -> None:
        self._close_files()
        with suppress(Exception):  # a store that has gone since
            checkpoint.tidy(self._folder, self._run_id)
        if not self.markers:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary folder, if that is where the checkpoints are."""
        self._kept.close()

    def catch_up(self) -> list[Checkpoint]:
        """After an attempt has failed: take in what its ranks did not live to tell.

        What they began and did not complete is removed. Returns the complete ones that nobody was
        told of, the oldest first.
        """
        self._close_files()
        known = {marker.name for marker in self.markers}
        with suppress(Exception):  # a store that does not answer now
            found = checkpoint.complete(self._folder)
            self.markers = [
                marker for marker in found if self._resume or marker.run_id == self._run_id
            ]
            checkpoint.tidy(self._folder, self._run_id, signs=False)
        untold = [marker for marker in self.markers if marker.name not in known]
        return [Checkpoint(self._folder, marker) for marker in reversed(untold)]

    def plan(self, attempt: int) -> CheckpointPlan:
        """What the ranks of an attempt are to know."""
        self._close_files()
        return CheckpointPlan(
            folder=self._folder.url,
            token=self._run_id,
            attempt=attempt,
            next_number=max([self._number, *(marker.number for marker in self.markers)]) + 1,
            keep=self._keep,
            best=self._best,
            mode=self._mode,
            lineage=self._resume,
            resume=tuple(self.markers),
        )

    @property
    def latest(self) -> Marker | None:
        """The latest one's marker."""
        return self.markers[0] if self.markers else None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All that are kept, the oldest first."""
        return [Checkpoint(self._folder, marker) for marker in reversed(self.markers)]

    @property
    def best(self) -> Checkpoint | None:
        """The best by the metric that they are ranked by; without one the latest."""
        ordered = self.markers
        if self._best is not None:
            ordered = ranked(ordered, self._best, self._mode)
            if ordered and math.isnan(ordered[0].metrics.get(self._best, math.nan)):
                return None
        return Checkpoint(self._folder, ordered[0]) if ordered else None

    def unranked(self, marker: Marker) -> str:
        """What to say of a checkpoint that lacks the metric they are ranked by; once."""
        if self._best is None or self._best in marker.metrics or self._said_unranked:
            return ""
        self._said_unranked = True
        there = ", ".join(marker.metrics) or "none"
        return (
            f"best={self._best!r}: the checkpoint of step {marker.step} has no such metric (it "
            f"has: {there}), so it counts as the latest only. Give it to save_checkpoint: metrics="
            "{...}"
        )

    def saved(self, marker: Marker) -> Checkpoint | None:
        """Take in that a checkpoint is complete; None where it is not, or was known.

        Raises:
            OSError: it came in pieces, and they cannot be made one.
            ValueError: no rank of this run writes such a one.
        """
        named = file_name(marker.number, marker.step, self._run_id, marker.kind)
        if marker.name != named or not is_name(named):
            raise ValueError(f"{marker.name!r} is not {named!r}")
        if any(marker.number <= known.number for known in self.markers):
            return None
        writing, self._writing = self._writing, None
        if writing is not None:
            name, file = writing
            file.close()
            part = Path(file.name)
            if name != marker.name or part.stat().st_size != marker.size:
                part.unlink()
                raise OSError(f"{part.name} lacks pieces")
            checkpoint.publish(self._folder, part, marker)
        self.markers.insert(0, marker)
        for old in surplus(self.markers, self._keep, self._best, self._mode):
            self.markers.remove(old)
            if writing is not None:
                with suppress(OSError):
                    checkpoint.remove(self._folder, old)
        return Checkpoint(self._folder, marker)

    def part(self, message: FilePart) -> Path | None:
        """Take in a piece of a file; gives the timeline's path when its first piece came.

        Raises:
            OSError: the disk is full; what came of the file is removed.
            ValueError: it is no piece of anything that is expected.
        """
        if message.name == "timeline":
            return self._timeline_part(message)
        local = self._folder.local(message.name)
        if not is_name(message.name) or local is None:
            raise ValueError(f"{message.name!r} is no checkpoint's name, or no part is expected")
        path = local.parent / f"{stores.PART}{message.name}"
        if message.offset == 0:
            self._close_files()
            self._writing = message.name, path.open("wb", buffering=0)
        if self._writing is None or self._writing[0] != message.name:
            return None  # the rest of one that could not be written
        try:
            _append(self._writing[1], message)
        except BaseException:
            self._close_files()
            path.unlink(missing_ok=True)
            raise
        return None

    def _timeline_part(self, message: FilePart) -> Path | None:
        if self._timeline is None:
            raise ValueError("no timeline is expected")
        with self._timeline.open("ab" if message.offset else "wb", buffering=0) as file:
            _append(file, message)
        return None if message.offset else self._timeline

    def fetch(self, message: Fetch) -> Fetched:
        """A piece of a checkpoint, for a rank that does not see the folder."""
        known = {marker.name: marker for marker in self.markers}
        try:
            if message.name not in known:
                raise CheckpointError(f"{message.name!r} is no checkpoint of this run.")
            if self._reading is None or self._reading[0] != message.name:
                self._close_files()
                path = Path(self._folder.path_of(message.name))
                checkpoint.check(path, known[message.name])
                self._reading = message.name, path.open("rb", buffering=0)
            file = self._reading[1]
            file.seek(min(max(0, message.offset), known[message.name].size))
            return Fetched(message.name, message.offset, file.read(_PIECE_BYTES))
        except (CheckpointError, OSError) as error:
            return Fetched(message.name, message.offset, problem=str(error))

    def _close_files(self) -> None:
        for opened in (self._writing, self._reading):
            if opened is not None:
                opened[1].close()
        self._writing = self._reading = None


def _append(file: BinaryIO, message: FilePart) -> None:
    if file.seek(0, os.SEEK_END) != message.offset:
        raise ValueError(f"a piece of {message.name} is not where the one before it ended")
    data = memoryview(message.data)
    while data:
        data = data[file.write(data) :]
