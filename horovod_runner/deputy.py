"""The driver's deputy: does its work beside rank 0 where no task can reach the driver itself.

    driver  X--- no way ---X  tasks --channel--> Deputy, beside task 0
       ^------ Outcome, with the deputy's Record, through Spark ------'

It is a Driver: it places the ranks, and ends all when one fails. What a driver shows, it keeps.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from typing import Literal

import msgspec

from horovod_runner.channel import Channel
from horovod_runner.driver import Driver
from horovod_runner.errors import HorovodRunnerError, LaunchError
from horovod_runner.job import Job, Outcome, Record
from horovod_runner.launchers.local import LocalLauncher
from horovod_runner.messages import (
    Began,
    Controller,
    Failed,
    FilePart,
    FromRank,
    Log,
    Output,
    Report,
    Saved,
    Unsaved,
)
from horovod_runner.rank import stderr_echo
from horovod_runner.sinks import Sink

_KEPT_CHARACTERS = 16 << 20
_KEPT_MESSAGES = 500_000
_KEPT_REPORTS = 100_000


class Deputy(Driver, Sink):
    """Works in a thread of its own from construction to :meth:`close`.

    Args:
        job: what the ranks run.
        host: an address of this host that all tasks reach.

    Attributes:
        address: of its channel, for the tasks.

    Raises:
        ChannelError: no socket could be opened.
    """

    # Its Launch, as far as one is asked for: the tasks were started by the driver.
    late = None
    expected = None
    running = False
    finished = False

    def __init__(self, job: Job, host: str) -> None:
        super().__init__(job, LocalLauncher(), self, threading.Event())
        self._facts: list[tuple[int, Began | Saved | Unsaved | Failed | str]] = []
        self._reports: list[tuple[int, Report]] = []
        self._every, self._seen, self._left_out = 1, 0, 0
        self._controller: Controller | None = None
        self._homeless: set[str] = set()  # checkpoints that came here in pieces
        self._texts: deque[tuple[int, Output | Log]] = deque()
        self._characters = 0
        self._cut = 0
        self._channel = Channel(host, job.size)
        self.address = self._channel.address
        self._thread = threading.Thread(
            target=self._work, name="horovod_runner-deputy", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        try:
            self._listen(self)
        except HorovodRunnerError:
            pass  # all are lost: Spark says so, sooner or later
        except Exception as error:
            self._problem = LaunchError(f"the driver's deputy failed: {error!r}")
            self._stop("the driver's deputy failed")

    def _handle(self, task: int, message: FromRank) -> None:
        match message:
            case FilePart():
                self._homeless.add(message.name)
            case Saved() if message.marker.name in self._homeless:
                step = message.marker.step
                why = "the ranks reach neither the driver nor its folder of checkpoints"
                self._facts.append((task, Unsaved(message.rank, step, why)))
            case Began() | Saved() | Unsaved():
                self._facts.append((task, message))
            case Output() | Log():
                self._keep(task, message)
            case Failed() if not self._stopped:  # else it was ended from here
                self._facts.append((task, message))
        super()._handle(task, message)

    def controller(self, name: Controller) -> None:
        """See :class:`~horovod_runner.sinks.Sink`."""
        self._controller = name

    def _keep(self, task: int, message: Output | Log) -> None:
        self._texts.append((task, message))
        self._characters += len(message.text)
        while self._characters > _KEPT_CHARACTERS or len(self._texts) > _KEPT_MESSAGES:
            _, first = self._texts.popleft()
            self._characters -= len(first.text)
            self._cut += len(first.text)

    def _on_reports(self, task: int, reports: list[Report]) -> None:
        for report in reports:
            self._keep_report(task, report)

    def _keep_report(self, task: int, report: Report) -> None:
        """Of very many every second one, of those every second one in turn, and so on."""
        self._seen += 1
        if self._seen % self._every:
            self._left_out += 1 + report.left_out
            return
        if self._left_out:
            report = msgspec.structs.replace(report, left_out=report.left_out + self._left_out)
            self._left_out = 0
        self._reports.append((task, report))
        if len(self._reports) > _KEPT_REPORTS:
            dropped = self._reports[::2]
            self._left_out += sum(1 + each.left_out for _, each in dropped)
            self._reports = self._reports[1::2]
            self._every *= 2

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """Kept as the message that it came in."""

    def log(self, rank: int, text: str) -> None:
        """Kept as the message that it came in."""

    def notice(self, text: str) -> None:
        """Keep what a driver would tell the user; until then it is in this executor's log."""
        stderr_echo(text)
        self._facts.append((-1, text))

    def cancel(self) -> None:
        """Nothing to add to the channel's Stop: the tasks end by themselves."""

    def outcomes(self) -> list[Outcome]:
        """The driver gets them, through Spark."""
        return []

    def close(self) -> Record:
        """Leave, when all ranks have ended; returns what the driver is to know."""
        self.finished = True
        self._channel.wake()
        self._thread.join()
        self._channel.close()
        problem = b"" if self._problem is None else pickle.dumps(self._problem)
        said = [*self._facts, *self._reports, *self._texts]
        return Record(self._slots, said, self._cut, problem, self._controller)
