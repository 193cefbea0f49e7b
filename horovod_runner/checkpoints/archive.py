"""The driver's side of checkpoints: lists a run's checkpoints and plans what ranks resume from.

A rank that sees the folder writes there itself. Other ranks send their checkpoints in pieces over
the channel, and the driver writes them.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from horovod_runner.checkpoints import checkpoint, owner
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.checkpoints.retention import ranked, surplus
from horovod_runner.common.descriptors import write_all
from horovod_runner.common.options import Options
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.folder import PART, Folder
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.problems import describe
from horovod_runner.host.scratch import RunFolder
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker, file_name, is_name
from horovod_runner.wire.messages import Fetch, Fetched, FilePart

_PIECE_BYTES = 4 << 20
_CHECK = (
    "The driver lists it and the ranks write to it: check its name, permissions and credentials."
)


class Archive:
    """A run's checkpoints, and its timeline: a context manager around the run.

    Attributes:
        markers: of the complete checkpoints, latest first.

    Raises:
        CheckpointError: the folder cannot be created, written to or listed.
    """

    def __init__(self, run_id: str, options: Options) -> None:
        self._run_id = run_id
        folder = options.checkpoint_dir
        self._url = None if folder is None else os.fspath(folder)
        # Here, because what cannot be reached is an error before the run waits for slots.
        self._opened = None if self._url is None else open_folder(self._url, check=True)
        self._config = options.checkpoint_config
        self._resume = options.resume
        self._owned = False
        timeline = options.debug_config.timeline
        self._timeline = None if timeline is None else Path(timeline)
        self._kept = ExitStack()
        self._timeline_file: BinaryIO | None = None
        self._writing: tuple[str, BinaryIO] | None = None
        self._reading: tuple[str, BinaryIO] | None = None
        self._refused = ""  # the name of a file whose pieces could not be written
        self._unsaved, self._unsaved_last = 0, ""
        self._has_warned = False
        self.markers: list[Marker] = []

    @property
    def chosen(self) -> str:
        """The path or URL that the user chose; empty for a temporary folder."""
        return self._url or ""

    def __enter__(self) -> Archive:
        if self._opened is None:
            scratch = self._kept.enter_context(RunFolder(f"{self._run_id}-checkpoints"))
            self._folder: Folder = LocalFolder(scratch.path)
        else:
            self._folder = self._opened
        try:
            local = self._folder.local("")
            if local is not None:
                if local.exists() and not local.is_dir():
                    raise NotADirectoryError("it is a file; name a folder")
                local.mkdir(parents=True, exist_ok=True)
                self._folder = LocalFolder(local.absolute())
            # First: an earlier run must complete no checkpoint after the folder was listed.
            before = ""
            if self._resume:
                with suppress(OSError):  # then no run can remove the files of another either
                    before = owner.take_over(self._folder, self._run_id)
                    self._owned = True
            markers = checkpoint.find_complete(self._folder)
            if local is not None or before:
                checkpoint.clean_up(self._folder, self._run_id, before=before)
            if local is not None:
                checkpoint.write_probe(self._folder, self._run_id)
        except Exception as error:  # every kind of folder raises different ones
            self._kept.close()
            raise CheckpointError(
                f"checkpoint_dir={self._folder.url!r} cannot be used: {describe(error, _CHECK)}"
            ) from error
        self._number = max((marker.number for marker in markers), default=0)
        self.markers = markers if self._resume else []
        return self

    def __exit__(self, *_: object) -> None:
        self._close_files()
        with suppress(OSError):
            self._close_timeline()
        with suppress(Exception):  # the folder may have become unreachable
            checkpoint.clean_up(self._folder, self._run_id)
        if not self.markers:
            self.discard()

    def keep_record(self, record: Path) -> None:
        """Copy the record of the run into the folder of its checkpoints.

        Raises:
            Exception: the folder cannot be written to; every kind of folder raises different ones.
        """
        self._folder.write(record.name, record.read_bytes())

    def discard(self) -> None:
        """Remove the checkpoints, if they are in a temporary folder."""
        self._kept.close()

    def catch_up(self) -> list[Checkpoint]:
        """After a failed attempt, find checkpoints that its ranks completed but did not report.

        Removes their unfinished files, and their journal.

        Returns:
            The newly found checkpoints, oldest first.
        """
        self._close_files()
        known = {marker.name for marker in self.markers}
        with suppress(Exception):  # the folder may be unreachable now
            markers = checkpoint.find_complete(self._folder)
            self.markers = [
                marker for marker in markers if self._resume or marker.run_id == self._run_id
            ]
            checkpoint.clean_up(self._folder, self._run_id, probes=False)
        new = [marker for marker in self.markers if marker.name not in known]
        return [Checkpoint(self._folder, marker) for marker in reversed(new)]

    def plan(self, attempt: int) -> CheckpointPlan:
        """Where the ranks of an attempt save checkpoints, and which ones they resume from.

        Raises:
            CheckpointError: a later run has taken the folder over.
        """
        self._close_files()
        if attempt > 1 and (taken := self._taken()):
            raise CheckpointError(f"no attempt {attempt} begins: {taken}")
        if attempt > 1 and isinstance(self._folder, LocalFolder):
            # Another run may have taken this one, which is a day old, for one that has crashed.
            checkpoint.write_probe(self._folder, self._run_id)
        return CheckpointPlan(
            folder=self._folder.url,
            token=self._run_id,
            attempt=attempt,
            next_number=max([self._number, *(marker.number for marker in self.markers)]) + 1,
            config=self._config,
            lineage=self._resume,
            owned=self._owned,
            resume=tuple(self.markers),
        )

    def _taken(self) -> str:
        if self._owned:
            with suppress(Exception):  # the folder may be unreachable
                return owner.taken_from(self._folder, self._run_id)
        return ""

    @property
    def latest(self) -> Marker | None:
        """The marker of the latest checkpoint; None if there is none."""
        return self.markers[0] if self.markers else None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The existing checkpoints, oldest first."""
        return [Checkpoint(self._folder, marker) for marker in reversed(self.markers)]

    @property
    def best(self) -> Checkpoint | None:
        """The best checkpoint by the configured metric; the latest if no metric is configured.

        None if there is no checkpoint, or if no checkpoint has the metric.
        """
        ordered, metric = self.markers, self._config.metric
        if metric is not None:
            ordered = ranked(ordered, metric, self._config.mode)
            if ordered and math.isnan(ordered[0].metrics.get(metric, math.nan)):
                return None
        return Checkpoint(self._folder, ordered[0]) if ordered else None

    def metric_warning(self, marker: Marker) -> str:
        """A warning if a checkpoint lacks the configured metric; empty otherwise, and after one."""
        metric = self._config.metric
        if metric is None or metric in marker.metrics or self._has_warned:
            return ""
        self._has_warned = True
        present = ", ".join(marker.metrics) or "none"
        return (
            f"metric={metric!r}: the checkpoint of step {marker.step} has no such metric (it has: "
            f"{present}), so it ranks last. Give the metric to save_checkpoint: metrics="
            "{...}"
        )

    def unsaved(self, what: str, why: str) -> str:
        """Record that a checkpoint ("the checkpoint of step 10") could not be written, and why.

        Returns:
            A text for the user.

        Raises:
            CheckpointError: the run's checkpoints are required.
        """
        latest = self.latest
        there = "there is no earlier one" if latest is None else f"that of step {latest.step} stays"
        told = f"{what} could not be written: {why}"
        self._unsaved, self._unsaved_last = self._unsaved + 1, told
        if self._config.required:
            raise CheckpointError(
                f"{told} CheckpointConfig(required=True) ends the run here; {there}."
            )
        return f"{told} The training goes on; {there}."

    def why(self, error: BaseException) -> str:
        """Why a checkpoint could not be written here, and what to change."""
        return describe(error, folder=self._folder.local(""))

    @property
    def timeline_folder(self) -> Path | None:
        """The folder of the timeline's file; None without one."""
        return None if self._timeline is None else self._timeline.absolute().parent

    def warnings(self, *, finished: bool) -> list[str]:
        """The warnings at the end of a run without checkpoints, ``finished`` if main returned."""
        if self._unsaved and not self._config.required:
            count, latest = self._unsaved, self.latest
            there = "There is none" if latest is None else f"The latest is of step {latest.step}"
            return [
                f"{count} checkpoint{'s' if count > 1 else ''} of this run could not be written. "
                f"{there}. The last error: {self._unsaved_last}"
            ]
        wanted = self._url is not None or self._config.required
        if finished and wanted and not self._unsaved and not self.markers:
            return [
                "the run has no checkpoint: main never called save_checkpoint. Call "
                "save_checkpoint(state, step) on every rank, or leave out checkpoint_dir."
            ]
        return []

    def saved(self, marker: Marker) -> Checkpoint | None:
        """Record a checkpoint that a rank has completed.

        Returns:
            The checkpoint; None if it is not newer than the latest, or could not be written here.

        Raises:
            CheckpointError: it was sent in pieces, and a later run has taken the folder over.
            OSError: it was sent in pieces, and some are missing or cannot be written.
            ValueError: the marker's name is not one that a rank of this run uses.
        """
        expected = file_name(marker.number, marker.step, self._run_id, marker.kind)
        if marker.name != expected or not is_name(expected):
            raise ValueError(f"{marker.name!r} is not {expected!r}")
        if any(marker.number <= known.number for known in self.markers):
            return None
        if marker.name == self._refused:  # said with its first piece
            return None
        writing, self._writing = self._writing, None
        if writing is not None:
            name, file = writing
            file.close()
            if taken := self._taken():
                raise CheckpointError(taken)
            part = Path(file.name)
            if name != marker.name or part.stat().st_size != marker.size:
                part.unlink()
                raise OSError(f"{part.name} lacks pieces")
            checkpoint.publish(self._folder, part, marker, owned=self._owned)
        self.markers.insert(0, marker)
        for old in surplus(self.markers, self._config):
            self.markers.remove(old)
            if writing is not None:
                with suppress(OSError):
                    checkpoint.remove(self._folder, old)
        return Checkpoint(self._folder, marker)

    def part(self, message: FilePart) -> Path | None:
        """Write a piece of a file.

        Returns:
            The timeline's path if this is its first piece, otherwise None.

        Raises:
            OSError: the disk is full; the unfinished file is removed.
            ValueError: no such file or piece is expected.
        """
        if message.name == "timeline":
            return self._timeline_part(message)
        local = self._folder.local(message.name)
        if not is_name(message.name) or local is None:
            raise ValueError(f"a piece of {message.name!r}, which is not an expected file")
        path = local.parent / f"{PART}{message.name}"
        try:
            if message.offset == 0:
                self._close_files()
                self._writing = message.name, path.open("wb", buffering=0)
            if self._writing is None or self._writing[0] != message.name:
                return None  # the rest of a file that could not be written
            _append(self._writing[1], message)
        except BaseException:
            self._close_files()
            self._refused = message.name
            path.unlink(missing_ok=True)
            raise
        return None

    def _timeline_part(self, message: FilePart) -> Path | None:
        if self._timeline is None:
            raise ValueError("no timeline is expected")
        if message.offset == 0:
            self._close_timeline()
            self._timeline_file = self._timeline.open("wb", buffering=0)
        if self._timeline_file is None:
            return None  # the rest of a file that could not be written
        try:
            _append(self._timeline_file, message)
        except OSError:
            self._close_timeline()
            with suppress(OSError):  # of a longer one, programs read the beginning
                if not self._timeline.stat().st_size:
                    self._timeline.unlink()
            raise
        return None if message.offset else self._timeline

    def _close_timeline(self) -> None:
        # Only at its end: a mounted store opens no file again to append to it.
        file, self._timeline_file = self._timeline_file, None
        if file is not None:
            file.close()

    def fetch(self, message: Fetch) -> Fetched:
        """Read a piece of a checkpoint, for a rank that does not see the folder."""
        known = {marker.name: marker for marker in self.markers}
        try:
            if message.name not in known:
                raise CheckpointError(f"{message.name!r} is not a checkpoint of this run.")
            if self._reading is None or self._reading[0] != message.name:
                self._close_files()
                path = Path(self._folder.path_of(message.name))
                # The task verifies the bytes: a digest of them would take this thread too long.
                checkpoint.check_size(path, known[message.name])
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
        raise ValueError(f"a piece of {message.name} does not begin where the last one ended")
    write_all(file.fileno(), message.data)
