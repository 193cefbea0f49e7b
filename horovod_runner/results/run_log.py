r"""The log of a run: a file to which its events are appended, and what they add up to.

    b"horovod_runner run 2\n"
    frames, each MessagePack of [time, event]:
        RunState, KeptMetrics, KeptProfile, KeptLines    what the run was when the file was written
        Output, Report, RanksPlaced, ...                 what has happened since

Where the events become many, the file is written anew. A reader skips events that it does not know,
and a frame that is not complete: the driver may be writing it, or was killed while it did.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.files import is_full, write_problem
from horovod_runner.common.slots import Controller, RankInfo
from horovod_runner.common.text import without_password
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results.metrics_table import MetricRows, Metrics
from horovod_runner.results.private_files import MORE_ROOM, replaced
from horovod_runner.results.recorder import Recorder
from horovod_runner.results.run import Attempt, Line, Run, Timings
from horovod_runner.results.slowness.profile import RunProfile, SavedProfile
from horovod_runner.wire import events
from horovod_runner.wire.events import Event, Status, TraceFile
from horovod_runner.wire.framing import LENGTH, frame
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.messages import RankEvent, encoder

#: The number grows where older files cannot be read any more.
HEADER: Final = b"horovod_runner run 2\n"
_MOST_PENDING: Final = 10_000  # events in memory
_APPENDED_SHARE: Final = 2  # of the bytes that it began with


class RunState(Event, frozen=True):
    """The attributes of a run that are small; see :class:`~horovod_runner.results.run.Run`."""

    run_id: str
    np: int | tuple[int, int]
    params: dict[str, Any]
    main: str
    where: str
    software: dict[str, str]
    status: Status
    attempts: list[Attempt]
    ranks: list[RankInfo]
    controller: Controller | None
    timings: Timings
    logs_cut: int
    traces: list[TraceFile]
    warnings: list[str]
    result_text: str
    checkpoints: list[tuple[str, Marker]]  # each with its folder, without a password
    attempts_cut: int = 0


class KeptMetrics(Event, frozen=True):
    """Reports, by rank."""

    rows: list[MetricRows]


class KeptProfile(Event, frozen=True):
    """What the ranks have measured of themselves."""

    profile: SavedProfile


class KeptLines(Event, frozen=True):
    """What was printed."""

    lines: list[Line]


_Kept = RunState | KeptMetrics | KeptProfile | KeptLines
# The hooks are for the arrays of metrics.
_encode: Final = encoder(lambda array: array.tobytes())
_decode: Final = msgspec.msgpack.Decoder(
    tuple[float, RankEvent | events.DriverEvent | _Kept],
    dec_hook=lambda kind, data: kind(data),
).decode


def _state(run: Run) -> RunState:
    plain = {
        name: getattr(run, name) for name in RunState.__struct_fields__ if name != "checkpoints"
    }
    checkpoints = [(without_password(each.folder), each.marker) for each in run.checkpoints]
    return RunState(**plain, checkpoints=checkpoints)


def _kept(run: Run) -> Iterator[_Kept]:
    """What a run is now."""
    yield _state(run)
    yield KeptMetrics(list(run._metrics.ranks.values()))
    yield KeptProfile(run.profile.saved())
    yield KeptLines(run.logs)


def _restore(run: Run, kept: _Kept) -> None:
    match kept:
        case RunState():
            for name in RunState.__struct_fields__:
                if name != "checkpoints":
                    setattr(run, name, getattr(kept, name))
            run._checkpoints[:] = [Checkpoint(*each) for each in kept.checkpoints]
        case KeptMetrics():
            run._metrics = Metrics(rows=kept.rows)
        case KeptProfile():
            run.profile = RunProfile.restored(kept.profile)
        case KeptLines():
            run._lines.extend(kept.lines)


def _frame(at: float, event: Event) -> bytes:
    if isinstance(event, events.CheckpointKept):
        event = msgspec.structs.replace(event, folder=without_password(event.folder))
    return frame(_encode((at, event)))


@dataclass(eq=False)
class RunLog:
    """Applies events to a run, and appends them to its file.

    A run goes on if its file cannot be written.

    Attributes:
        problem: why the file does not have the last events, for the user; empty if it has, or if
            the folder is not for writing.
    """

    run: Run
    path: Path | None = None  # None: it is kept in memory alone
    clock: Callable[[], float] | None = None  # None: the run's
    flush_seconds: float = 5.0
    least_appended: int = 8 << 20  # bytes, before the file is written anew

    def __post_init__(self) -> None:
        self._clock = self.clock or self.run._clock
        self.problem = ""
        self._recorder = Recorder(self.run)
        self._lock = threading.Lock()
        self._pending: list[tuple[float, Event]] = []
        self._is_begun = False  # whether the file is there, and events may be appended to it
        self._appended = self._begun_with = 0
        self._due = self._clock() + self.flush_seconds

    def add(self, events: Sequence[Event]) -> None:
        """Add events; reports of one rank together."""
        now = self._clock()
        with self._lock:
            self._recorder.add(events, now)
            if self.path is not None:
                self._pending += [(now, event) for event in events]
                if len(self._pending) > _MOST_PENDING:
                    self._flush()

    def idle(self) -> None:
        """Write the events if they are due."""
        if self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write all events; from any thread. The file gets a new time of modification."""
        with self._lock:
            self._flush()
            if self.path is not None:
                with suppress(OSError):
                    os.utime(self.path)
                    _make_latest(self.path)

    def _flush(self) -> None:
        self._due = self._clock() + self.flush_seconds
        pending, self._pending = self._pending, []
        path = self.path
        if path is None:
            return
        self.problem = ""
        try:
            most = max(self.least_appended, _APPENDED_SHARE * self._begun_with)
            if not self._is_begun or self._appended > most:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._begun_with = save(self.run, path, self._clock())
                _make_latest(path)
                self._is_begun, self._appended = True, 0
            elif pending:
                self._append(path, b"".join(_frame(*each) for each in pending))
        except OSError as error:  # the next time there may be room
            self._is_begun = False
            if is_full(error):
                self.problem = (
                    "the record of this run could not be written: "
                    f"{write_problem(error, path.parent)}. `horovod-runner report` and "
                    f"load_run do not find the run. {MORE_ROOM}"
                )

    def _append(self, path: Path, data: bytes) -> None:
        with path.open("r+b") as file:  # which fails where somebody has removed it
            file.seek(0, os.SEEK_END)
            file.write(data)
        self._appended += len(data)

    def close(self) -> None:
        """Write the run as it is now, and nothing more."""
        with self._lock:
            self._is_begun = False
            self._flush()
            self.path = None


def save(run: Run, path: str | os.PathLike[str], now: float | None = None) -> int:
    """Write a run to a file for this user alone, which replaces it at once; returns its size."""
    path = Path(path)
    at = time.time() if now is None else now
    with replaced(path) as file:
        file.write(HEADER)
        for kept in _kept(run):
            file.write(_frame(at, kept))
        return file.tell()


def _make_latest(path: Path) -> None:
    """Keep the files of a folder in the order of their writing, also if the clock was set back."""
    others = [
        file.stat().st_mtime_ns for file in path.parent.glob(f"*{path.suffix}") if file != path
    ]
    latest = max(others, default=0)
    if path.stat().st_mtime_ns <= latest:
        os.utime(path, ns=(latest + 1, latest + 1))


class LogReader:
    """Reads the log of a run, also while it is written.

    Raises:
        HorovodRunnerError: the file cannot be read, or is not the log of a run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._position = self._inode = 0
        self.read()

    def read(self) -> None:
        """Read what has been added since."""
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode:  # written anew
                    _check_header(file, self._path)
                    self._inode, self._position = found.st_ino, len(HEADER)
                    self.run = Run("", 0)
                    self._recorder = Recorder(self.run)
                file.seek(self._position)
                for at, event in _events(file):
                    self._apply(at, event)
                    self._position = file.tell()
                self.run.recorded = found.st_mtime
        except OSError as error:
            raise HorovodRunnerError(f"the record of a run cannot be read: {error}") from error
        if not self.run.run_id:
            raise HorovodRunnerError(f"{self._path} is not the record of a run: it has no begin")

    def _apply(self, at: float, event: Event) -> None:
        if isinstance(event, _Kept):
            _restore(self.run, event)
            self._recorder = Recorder(self.run)
        else:
            self._recorder.add([event], at)


def _check_header(file: BinaryIO, path: Path) -> None:
    if file.read(len(HEADER)) != HEADER:
        raise HorovodRunnerError(
            f"{path} is not the record of a run, or one of another version of horovod_runner"
        )


def _events(file: BinaryIO) -> Iterator[tuple[float, Event]]:
    """The events from a position on, each with its time; unknown ones are left out."""
    while len(prefix := file.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(prefix)
        data = file.read(length)
        if len(data) < length:
            return
        with suppress(msgspec.MsgspecError):  # of a later version
            yield _decode(data)


def load(path: str | os.PathLike[str]) -> Run:
    """Read a run, in the state in which its file was last written."""
    return LogReader(path).run


def summary(path: str | os.PathLike[str]) -> tuple[float, RunState]:
    """When a file was written anew last, and what the run was then, without its large parts.

    Raises:
        HorovodRunnerError: it is not the log of a run.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        _check_header(file, Path(path))
        for at, event in _events(file):
            if isinstance(event, RunState):
                return at, event
    raise HorovodRunnerError(f"{path} is not the record of a run: it has no begin")
