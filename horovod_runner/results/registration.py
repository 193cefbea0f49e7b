"""Keeps a run listed while it lasts, and obeys what commands write to its FIFO; see `registry`."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from horovod_runner.common.files import is_full, write_problem
from horovod_runner.common.slots import RankInfo
from horovod_runner.common.threads import start_thread
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results.private_files import MORE_ROOM, replaced
from horovod_runner.results.registry import STOP, WRITE, Entry, born, folder, forget
from horovod_runner.results.run import Run
from horovod_runner.sinks.sink import Sink

_CLOSE = b"."


class Registration(Sink):
    """Keeps a run listed and recorded while it lasts; use it as a context manager.

    If the entry cannot be written (a read-only home folder), the run goes on unlisted.

    Attributes:
        problem: why the run is not listed, for the user; empty if it is, or if the folder is not
            for writing.
    """

    def __init__(self, run: Run, cancel: Callable[[], None], write_log: Callable[[], None]) -> None:
        self._entry = Entry(
            run.run_id,
            run.main,
            run.np,
            run.where,
            socket.gethostname(),
            os.getpid(),
            born(os.getpid()),
            run.timings.queued,
        )
        self.problem = ""
        self._cancel = cancel
        self._write_log = write_log
        self._thread: threading.Thread | None = None  # None where the run is not listed

    def __enter__(self) -> Registration:
        run_id = self._entry.run_id
        try:
            folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_entry()
            fifo = folder() / f"{run_id}.stop"
            os.mkfifo(fifo, 0o600)
            # Opened for writing too: reads never see an end, and __exit__ can wake the thread.
            self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, HorovodRunnerError) as error:  # there may be no home folder
            with suppress(OSError, HorovodRunnerError):
                forget(run_id)
            if isinstance(error, OSError) and is_full(error):
                self.problem = (
                    f"this run is not listed: {write_problem(error, folder())}. `horovod-runner ps`"
                    f", `stop` and `top` do not find it. {MORE_ROOM}"
                )
            return self
        self._thread = start_thread("stop", self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        os.write(self._fifo, _CLOSE)
        self._thread.join()
        os.close(self._fifo)
        with suppress(OSError):
            forget(self._entry.run_id)

    def _listen(self) -> None:
        poller = select.poll()  # select() cannot handle descriptors above 1023
        poller.register(self._fifo, select.POLLIN)
        while True:
            poller.poll()
            command = os.read(self._fifo, 1)
            if command == _CLOSE:
                return
            if command == STOP:
                self._cancel()
            elif command == WRITE:
                with suppress(Exception):  # whatever is wrong with it: the run can still be stopped
                    self._write_log()

    def _write_entry(self) -> None:
        with replaced(folder() / f"{self._entry.run_id}.json") as file:
            file.write(msgspec.json.encode(self._entry))

    def ranks(self, ranks: list[RankInfo]) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`: write the ranks into the entry."""
        if self._thread is not None:
            self._entry.ranks = [(rank.rank, rank.host, rank.pid) for rank in ranks]
            with suppress(OSError):
                self._write_entry()
