"""The journal of a run in detached mode: numbered files, usually in the checkpoint folder.

    StandIn --> JournalWriter --> .live-RUN-1-1, .live-RUN-1-2, ... --> JournalReader --> driver

Each file is written once, and the driver removes it when it has read it. Nothing in it is ever
unpickled. Where the executors do not see the folder, the files are in a ServedFolder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

import msgspec

from horovod_runner.checkpoints.checkpoint import LIVE, has_probe
from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.threads import start_thread
from horovod_runner.driver.detached.served import CalledFolder, ServedFolder
from horovod_runner.host.folders.folder import Folder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.wire.job import Job, Kept, Record, decode_kept
from horovod_runner.wire.job_file import CheckpointPlan

_PERIOD_SECONDS: Final = 1.0
_MOST_UNREAD = 8  # files; then the writer waits for the driver
_MOST_BROKEN: Final = 30
#: Where the driver reads a journal.
JournalSource = Folder | CalledFolder


def _name(plan: CheckpointPlan, number: int) -> str:
    return f"{LIVE}{plan.token}-{plan.attempt}-{number}"


def open_writer(job: Job) -> JournalWriter | None:
    """The journal for a stand-in; None where the driver could not read it."""
    plan = job.checkpoints
    with suppress(Exception):  # fsspec is not installed, or the store is not reached from here
        if plan.folder:
            folder = open_folder(plan.folder)
            if has_probe(folder, plan.token):
                # By this file the driver finds the journal; and it shows that files can be written.
                folder.write(_name(plan, 1), msgspec.msgpack.encode([]))
                return JournalWriter(plan, folder, written=1, limits=job.limits)
    with suppress(OSError):
        if job.call is not None:
            return JournalWriter(plan, ServedFolder(job.call, job.limits), limits=job.limits)
    return None


class JournalWriter:
    """Writes one file at a time, in a thread of its own: a store may be slow.

    Attributes:
        written: how many files are complete.
        unwritten: what :meth:`put` was given and no file has; None if all is written.
        unread: after :meth:`close`, what the last of the written files had, if they are gone.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        folder: Folder | ServedFolder,
        written: int = 0,
        *,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._limits = limits
        self._plan = plan
        self._folder = folder
        self.written = written
        self.unwritten: list[Kept] | None = None
        self.unread: list[list[Kept]] = []
        self._due_at = 0.0
        self._given: SimpleQueue[list[Kept] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = start_thread("journal", self._work)

    @property
    def ready(self) -> bool:
        """Whether :meth:`put` may be called: the last file is written, and not only just."""
        return self.unwritten is None and time.monotonic() >= self._due_at

    def put(self, kept: list[Kept]) -> None:
        """Write a file. Returns at once; a file that cannot be written is tried again."""
        self._due_at = time.monotonic() + _PERIOD_SECONDS
        self.unwritten = kept
        self._given.put(kept)

    def close(self) -> None:
        """Stop writing; what is :attr:`unwritten` then has to take another way."""
        self._closed.set()
        self._given.put(None)
        self._thread.join(self._limits.journal_write)
        if isinstance(self._folder, ServedFolder):
            self.unread = [decode_kept(data) for data in self._folder.close()]

    def _work(self) -> None:
        while (kept := self._given.get()) is not None:
            data = msgspec.msgpack.encode(kept)
            while not self._closed.is_set():
                if self._write(data):
                    break
                self._closed.wait(_PERIOD_SECONDS)

    def _write(self, data: bytes) -> bool:
        number = self.written + 1
        try:
            behind = number - _MOST_UNREAD
            if behind > 0 and self._folder.size(_name(self._plan, behind)) is not None:
                return False  # the driver has not read that one yet
            self._folder.write(_name(self._plan, number), data)
        except Exception:  # every kind of folder raises different ones
            return False
        self.written = number
        self.unwritten = None
        return True


class JournalReader:
    """Reads the files in a thread of its own, from construction to :meth:`finish`.

    Args:
        sources: where they may be; all are in the first one that has any.

    Attributes:
        source: where the files are; None before one has been read.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        sources: Sequence[JournalSource],
        wake: Callable[[], None],
        *,
        limits: Limits = DEFAULTS,
        most_broken: int = _MOST_BROKEN,
    ) -> None:
        self._limits = limits
        self._most_broken = most_broken
        self._plan = plan
        self._sources = sources
        self._wake = wake
        self.source: JournalSource | None = None
        self._next = 1
        self._broken = 0
        self._read: SimpleQueue[list[Kept]] = SimpleQueue()
        self._over = threading.Event()
        self._thread = start_thread("journal", self._work)

    def take(self) -> list[list[Kept]]:
        """What has been read since the last call."""
        return [self._read.get() for _ in range(self._read.qsize())]

    def finish(self, record: Record | None) -> list[list[Kept]]:
        """Stop reading; returns the rest. The record is the stand-in's; None if it is lost."""
        self._over.set()
        self._thread.join()
        until = time.monotonic() + self._limits.journal_rest
        last = None if record is None else record.written - len(record.unread)
        while last is None or self._next <= last:
            if not self._read_next():
                if last is None or time.monotonic() > until:
                    break
                time.sleep(0.1)  # a store offers no event
        for source in self._sources:
            if isinstance(source, CalledFolder):
                source.close()
        unread = [] if record is None else record.unread
        return [*self.take(), *unread[max(0, self._next - 1 - (last or 0)) :]]

    def _work(self) -> None:
        give_up_at = time.monotonic() + self._limits.journal_begin
        while self.source is not None or time.monotonic() < give_up_at:
            # A driver that is slow to show them leaves the rest to the writer, which drops some.
            if self._read.qsize() < _MOST_UNREAD and self._read_next():
                self._wake()
            elif self._over.wait(_PERIOD_SECONDS):
                return

    def _read_next(self) -> bool:
        """Read the next file; False if it is nowhere, or not complete."""
        sources = self._sources if self.source is None else [self.source]
        return any(self._read_from(source) for source in sources)

    def _read_from(self, source: JournalSource) -> bool:
        name = _name(self._plan, self._next)
        try:
            kept = decode_kept(source.read(name))
        except msgspec.MsgspecError:  # not all stores write a file in one step
            self._broken += 1
            if self._broken > self._most_broken:
                self._next, self._broken = self._next + 1, 0
            return False
        except Exception:  # it is not there yet; every kind of folder raises different ones
            return False
        self._next, self._broken = self._next + 1, 0
        self.source = source
        self._read.put(kept)
        with suppress(Exception):
            source.remove(name)
        return True
