"""The base class of all sinks: one method for each kind of event of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.wire import events, measurements

if TYPE_CHECKING:
    from horovod_runner.common.slots import Controller, RankInfo
    from horovod_runner.results.run import Run
    from horovod_runner.wire.events import Report, TraceFile
    from horovod_runner.wire.measurements import Lines, Machine, Profile


class Sink:
    """Receives what the ranks of a run send back. Override the methods you need; all do nothing.

        class Slack(Sink):
            def report(self, report):
                if report.epoch is not None:
                    post(f"epoch {report.epoch}: {dict(report.metrics)}")

        HorovodRunner(np=4, sinks=[Slack()]).run(main)

    Each sink in ``sinks=[...]`` is called in a separate thread, one call after the other (except
    :meth:`prepare`). Several runs at once of one runner call it from several threads, each run from
    its own. If a method raises, a notice says so once and the sink receives nothing more. The run
    continues.
    """

    def prepare(self) -> None:
        """The first call, in the thread that calls ``run``; after ``start``, in that of the run."""

    def begin(self, run: Run) -> None:
        """The run begins; ``run`` is the object that ``runner.last_run`` returns."""

    def attempt(self, number: int) -> None:
        """All ranks are about to be launched; ``number`` is 1 at first, and grows by restarts."""

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """A rank printed a piece of text."""

    def log(self, rank: int, text: str) -> None:
        """A rank called ``log_to_driver``."""

    def notice(self, text: str) -> None:
        """The runner itself has a message for the user."""

    def controller(self, name: Controller) -> None:
        """Horovod coordinates and reduces on CPUs with ``name``: "gloo" or "mpi"."""

    def ranks(self, ranks: list[RankInfo]) -> None:
        """Where the ranks run, once all have started; called again with their exit codes."""

    def began(self, rank: int) -> None:
        """A rank calls its ``main``."""

    def report(self, report: Report) -> None:
        """A rank called ``report``.

        The report has ``rank``, ``metrics``, ``step``, ``epoch``, ``total_steps`` and ``time``.
        """

    def reports(self, reports: Sequence[Report]) -> None:
        """Several reports of one rank arrived together; calls :meth:`report` with each.

        Only the runner's built-in sinks get this call. A sink in ``sinks=[...]`` gets
        :meth:`report` for each report.
        """
        for report in reports:
            self.report(report)

    def profile(self, profile: Profile) -> None:
        """A rank says where its last second went: seconds by kind, steps, collectives."""

    def machine(self, machine: Machine) -> None:
        """The task beside a rank says what the rank's host did: cores, memory, disk, network."""

    def lines(self, lines: Lines) -> None:
        """A rank says at which lines it was seen, from its start."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete."""

    def trace(self, trace: TraceFile) -> None:
        """A file with a trace is here: of the run's collectives, or of some steps of a rank.

        It has ``rank``, ``kind`` and ``path``. Horovod's timeline may still grow.
        """

    def idle(self) -> None:
        """Nothing arrived for a second: time to send buffered data.

        The runner's built-in sinks get this call after each poll, at least once a second.
        """

    def end(self, run: Run) -> None:
        """The run has ended; ``run.status`` says how. This is the last call."""


class StepCounter:
    """Finds the step of each report of one rank, also of one that reports without steps."""

    def __init__(self) -> None:
        self._count = 0
        self._last: int | None = None

    def step_of(self, report: Report) -> int:
        """Return the report's step, otherwise the last known step, otherwise the report count."""
        self._count += 1
        self._last = self._last if report.step is None else report.step
        return self._count if self._last is None else self._last


#: The names of a sink's methods.
EVENTS: Final = tuple(name for name in vars(Sink) if not name.startswith("_"))
# The method for each event, and its arguments. Other events are for the log alone.
_METHODS: Final[dict[type[events.Event], tuple[str, Callable[[Any], tuple[Any, ...]]]]] = {
    events.AttemptBegan: ("attempt", lambda event: (event.number,)),
    events.Output: ("output", lambda event: (event.rank, event.stream, event.text)),
    events.Log: ("log", lambda event: (event.rank, event.text)),
    events.Notice: ("notice", lambda event: (event.text,)),
    events.ControllerChosen: ("controller", lambda event: (event.name,)),
    events.RanksPlaced: ("ranks", lambda event: (event.ranks,)),
    events.Began: ("began", lambda event: (event.rank,)),
    events.Report: ("report", lambda event: (event,)),
    measurements.Profile: ("profile", lambda event: (event,)),
    measurements.Machine: ("machine", lambda event: (event,)),
    measurements.Lines: ("lines", lambda event: (event,)),
    events.CheckpointKept: ("checkpoint", lambda event: (Checkpoint(event.folder, event.marker),)),
    events.TraceWritten: ("trace", lambda event: (event.trace,)),
}


def call_for(event: events.Event) -> tuple[str, tuple[Any, ...]] | None:
    """The name of a sink's method for an event, and its arguments; None if there is no method."""
    method = _METHODS.get(type(event))
    return None if method is None else (method[0], method[1](event))
