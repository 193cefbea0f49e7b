"""Supervises the ranks from an executor, where no task can reach the driver itself.

    driver  X--- no way ---X  tasks --channel--> StandIn, beside task 0
       ^------ Outcome, with the stand-in's Record, through Spark ------'

It uses the driver's supervisor. What a driver shows, it keeps, for the driver to show at the end.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from typing import assert_never

import msgspec

from horovod_runner.driver.intake import Content, no_archive
from horovod_runner.driver.supervisor import Supervisor
from horovod_runner.errors import CheckpointError, HorovodRunnerError, LaunchError
from horovod_runner.task.task import stderr_echo
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.job import Job, Outcome, Record
from horovod_runner.wire.measurements import Lines, Machine, Profile
from horovod_runner.wire.messages import (
    Began,
    Controller,
    Fetch,
    Fetched,
    FilePart,
    Log,
    Output,
    Report,
    Saved,
    Unsaved,
    Untraced,
    is_trace,
)
from horovod_runner.wire.slots import RankInfo

_KEPT_CHARACTERS = 16 << 20
_KEPT_MESSAGES = 500_000
_KEPT_REPORTS = 100_000


class StandIn:
    """Supervises in a thread of its own from construction to :meth:`close`.

    Args:
        job: what the ranks run.
        host: an address of this host that all tasks reach.

    Attributes:
        address: of its channel, for the tasks.

    Raises:
        ChannelError: no socket could be opened.
    """

    def __init__(self, job: Job, host: str) -> None:
        self._keeper = Keeper(required=job.options.checkpoint_config.required)
        self._channel = Channel(host, job.size)
        self.address = self._channel.address
        self._launch = _StartedElsewhere()
        self._supervisor = Supervisor(
            job, self._channel, self._launch, self._keeper, threading.Event()
        )
        self._thread = threading.Thread(
            target=self._work, name="horovod_runner-stand-in", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        try:
            self._supervisor.run()
        except HorovodRunnerError:
            pass  # all ranks are lost: Spark reports it to the driver
        except Exception as error:
            self._supervisor.fail(LaunchError(f"the supervisor beside rank 0 failed: {error!r}"))

    def close(self) -> Record:
        """Stop supervising once all ranks have ended; returns the record for the driver."""
        self._launch.finished = True
        self._channel.wake()
        self._thread.join()
        self._channel.close()
        problem = self._supervisor.problem
        return Record(
            self._supervisor.roster.slots,
            self._keeper.kept,
            self._keeper.cut,
            b"" if problem is None else pickle.dumps(problem),
            self._keeper.chosen,
            list(self._supervisor.failed.values()),
        )


class _StartedElsewhere:
    """Takes the place of the launch: the driver started the tasks."""

    lost = ()
    late_error = None
    expected = None
    running = False
    finished = False

    def cancel(self) -> None:
        """Do nothing: the tasks hear the channel's Stop, and end by themselves."""

    def outcomes(self) -> list[Outcome]:
        """Return none: the driver gets them, through Spark."""
        return []


class Keeper:
    """The stand-in's observer: keeps what a driver would show or store.

    Args:
        required: whether a checkpoint that cannot be written ends the run.

    Attributes:
        cut: how many characters of output were too many to keep.
        chosen: what Horovod coordinates with; None before the ranks are placed.
    """

    def __init__(self, *, required: bool = False) -> None:
        self._required = required
        self.cut = 0
        self.chosen: Controller | None = None
        self._facts: list[Began | Saved | Unsaved | Untraced | str] = []
        self._reports: list[Report] = []
        self._every, self._seen, self._left_out = 1, 0, 0
        self._texts: deque[Output | Log] = deque()
        self._profiles: deque[Profile | Machine] = deque(maxlen=_KEPT_REPORTS)
        self._lines: dict[tuple[int, str], Lines] = {}
        self._characters = 0
        self._in_parts: set[str] = set()  # names of files that the driver cannot get

    @property
    def kept(
        self,
    ) -> list[
        Began | Saved | Unsaved | Untraced | Report | Profile | Machine | Lines | Output | Log | str
    ]:
        """What was kept; a text alone is a notice for the user."""
        lines = self._lines.values()
        return [*self._facts, *self._reports, *self._profiles, *lines, *self._texts]

    def take(self, message: Content) -> Fetched | None:
        """See :class:`~horovod_runner.driver.intake.Observer`; so for all below."""
        match message:
            case Fetch():
                return no_archive(message)
            case FilePart():
                self._leave_out(message)
            case Saved() if message.marker.name in self._in_parts:
                step = message.marker.step
                why = (
                    "the ranks reach neither the driver nor its folder of checkpoints. Set "
                    "checkpoint_dir to a folder or URL that driver and executors share."
                )
                self._keep_unsaved(Unsaved(message.rank, step, why))
            case Unsaved():
                self._keep_unsaved(message)
            case Began() | Saved() | Untraced():
                self._facts.append(message)
            case Output() | Log():
                self._keep_text(message)
            case Profile() | Machine():
                self._profiles.append(message)
            case Lines():
                self._lines[message.rank, message.thread] = message
            case _:
                assert_never(message)
        return None

    def _keep_unsaved(self, message: Unsaved) -> None:
        self._facts.append(message)
        if self._required:
            raise CheckpointError(
                f"the checkpoint of step {message.step} could not be written: {message.reason} "
                "CheckpointConfig(required=True) ends the run here."
            )

    def _leave_out(self, message: FilePart) -> None:
        if is_trace(message) and message.name not in self._in_parts:
            why = "In detached mode no files come back from the executors."
            self._facts.append(Untraced(message.rank, why))
        self._in_parts.add(message.name)

    def _keep_text(self, message: Output | Log) -> None:
        self._texts.append(message)
        self._characters += len(message.text)
        while self._characters > _KEPT_CHARACTERS or len(self._texts) > _KEPT_MESSAGES:
            first = self._texts.popleft()
            self._characters -= len(first.text)
            self.cut += len(first.text)

    def reports(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._keep_report(report)

    def _keep_report(self, report: Report) -> None:
        """Keep a report; above the limit drop every second one, then every second of the rest."""
        self._seen += 1
        if self._seen % self._every:
            self._left_out += 1 + report.left_out
            return
        if self._left_out:
            report = msgspec.structs.replace(report, left_out=report.left_out + self._left_out)
            self._left_out = 0
        self._reports.append(report)
        if len(self._reports) > _KEPT_REPORTS:
            dropped = self._reports[::2]
            self._left_out += sum(1 + each.left_out for each in dropped)
            self._reports = self._reports[1::2]
            self._every *= 2

    def notice(self, text: str) -> None:
        stderr_echo(text)  # until the end of the run it is in this executor's log
        self._facts.append(text)

    def controller(self, name: Controller) -> None:
        self.chosen = name

    def ranks(self, ranks: list[RankInfo]) -> None:
        """The driver describes the ranks itself."""

    def idle(self) -> None:
        """There is nothing to redraw."""
