"""Where what comes back from the ranks is shown and kept.

A sink of one's own is a class with those of :class:`Sink`'s methods that it cares for::

    class Slack(Sink):
        def report(self, report):
            if report.epoch is not None:
                post(f"epoch {report.epoch}: {dict(report.metrics)}")

    HorovodRunner(np=4, sinks=[Slack()]).run(main)
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from horovod_runner.checkpoint import Checkpoint
    from horovod_runner.messages import Controller, Report
    from horovod_runner.result import Run
    from horovod_runner.topology import RankInfo

#: The metric that tells how many steps there will be.
TOTAL: Final = "total_steps"
_CLOSE_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 5.0
_QUEUED_EVENTS: Final = 100_000
# Of these there may be too many; of all others there are few.
_MANY: Final = ("report", "output", "log")


class Sink:
    """Takes what comes back from the ranks of a run; each method here does nothing.

    Those that are given to HorovodRunner are called in a thread of their own (but for
    :meth:`prepare`), one call after the other; what they raise is shown once and ends them, not the
    run.
    """

    def prepare(self) -> None:
        """The first call, in the thread that calls ``run``: for what is bound to that thread."""

    def begin(self, run: Run) -> None:
        """The run begins; ``run`` is what ``runner.last_run`` gives, with ``run.params``."""

    def attempt(self, number: int) -> None:
        """All ranks are about to be launched, for the ``number``-th time from 1 on."""

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """A piece of what a rank printed."""

    def log(self, rank: int, text: str) -> None:
        """What ``log_to_driver`` was called with."""

    def notice(self, text: str) -> None:
        """Something that the runner itself has to say."""

    def controller(self, name: Controller) -> None:
        """What the ranks' Horovod negotiates and reduces on CPUs with."""

    def ranks(self, ranks: list[RankInfo]) -> None:
        """Where the ranks are, once all have started; and again with their exit codes."""

    def began(self, rank: int) -> None:
        """A rank's ``main`` is called."""

    def report(self, report: Report) -> None:
        """What ``report`` was called with: ``report.rank``, ``.metrics``, ``.step``, ``.epoch``."""

    def reports(self, reports: Sequence[Report]) -> None:
        """Some of one rank that came together; calls :meth:`report` with each."""
        for report in reports:
            self.report(report)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete."""

    def idle(self) -> None:
        """Nothing has come for a second: time to send on what was gathered.

        The runner's own sinks are told after each look for messages, once a second at least.
        """

    def end(self, run: Run) -> None:
        """The run has ended; ``run.status`` tells how. The last call."""


class Steps:
    """The steps of one rank's reports."""

    def __init__(self) -> None:
        self._count = 0
        self._last: int | None = None

    def of(self, report: Report) -> int:
        """A report's step: its own, else that of the last one with a step, else their count."""
        self._count += 1
        self._last = self._last if report.step is None else report.step
        return self._count if self._last is None else self._last


class Sinks(Sink):
    """Hands everything on: to those that show it, in the calling thread, and to those of the user.

    Args:
        own: called at once.
        others: called in threads of their own.
        notice: takes a line for the user, when one of those fails.
    """

    def __init__(
        self, own: Sequence[Sink], others: Iterable[Sink], notice: Callable[[str], None]
    ) -> None:
        self._own = own
        self._others = [_Apart(sink, notice) for sink in others]

    def begin(self, run: Run) -> None:
        """See :class:`Sink`; so for all below."""
        self._hand("begin", run)

    def attempt(self, number: int) -> None:
        self._hand("attempt", number)

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        self._hand("output", rank, stream, text)

    def log(self, rank: int, text: str) -> None:
        self._hand("log", rank, text)

    def notice(self, text: str) -> None:
        self._hand("notice", text)

    def controller(self, name: Controller) -> None:
        self._hand("controller", name)

    def ranks(self, ranks: list[RankInfo]) -> None:
        self._hand("ranks", ranks)

    def began(self, rank: int) -> None:
        self._hand("began", rank)

    def reports(self, reports: Sequence[Report]) -> None:
        for sink in self._own:
            sink.reports(reports)
        for other in self._others:
            for report in reports:
                other.put("report", (report,))

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self._hand("checkpoint", checkpoint)

    def idle(self) -> None:
        for sink in self._own:
            sink.idle()

    def end(self, run: Run) -> None:
        self._hand("end", run)

    def _hand(self, event: str, *arguments: Any) -> None:
        for sink in self._own:
            getattr(sink, event)(*arguments)
        for other in self._others:
            other.put(event, arguments)

    def close(self) -> None:
        """Wait until the user's sinks have taken everything, for half a minute at most."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for other in self._others:
            other.close()
        for other in self._others:
            other.wait(deadline)


class _Apart:
    """A sink in a thread of its own: it may be slow, wait for a server, or fail."""

    def __init__(self, sink: Sink, notice: Callable[[str], None]) -> None:
        self._sink = sink
        self._name = type(sink).__name__
        self._notice = notice
        self._events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._left_out = 0
        self._thread = threading.Thread(
            target=self._work, name=f"horovod_runner-sink-{self._name}", daemon=True
        )
        try:
            self._call("prepare", ())
        except Exception as error:
            self._give_up("prepare", error)
        self._thread.start()

    def put(self, event: str, arguments: tuple[Any, ...]) -> None:
        with self._changed:
            if self._closed:
                return
            if len(self._events) >= _QUEUED_EVENTS and event in _MANY:
                self._left_out += 1
                return
            self._events.append((event, arguments))
            self._changed.notify()

    def _work(self) -> None:
        told = True  # of being idle
        while True:
            with self._changed:
                while not self._events:
                    if self._closed:
                        return
                    if not self._changed.wait(None if told else _IDLE_SECONDS):
                        break
                event, arguments = self._events.popleft() if self._events else ("idle", ())
            told = event in ("idle", "end")
            try:
                self._call(event, arguments)
            except Exception as error:
                self._give_up(event, error)
                return

    def _call(self, event: str, arguments: tuple[Any, ...]) -> None:
        method = getattr(self._sink, event, None)
        if method is not None:
            method(*arguments)

    def _give_up(self, event: str, error: Exception) -> None:
        self._notice(
            f"the sink {self._name} failed in {event}() and gets nothing more of this run: "
            f"{type(error).__name__}: {error}"
        )
        with self._changed:
            self._closed = True
            self._events.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                waiting = len(self._events)
                few = [queued for queued in self._events if queued[0] not in _MANY]
                self._events = deque(few)
            self._notice(
                f"the sink {self._name} has not taken everything {_CLOSE_SECONDS:.0f} s after the "
                f"end of the run: it goes on as long as this process does, without "
                f"{waiting - len(few)} reports and lines"
            )
            self._thread.join(_LAST_SECONDS)
        elif self._left_out:
            self._notice(
                f"the sink {self._name} was too slow: {self._left_out} reports and lines were left "
                "out"
            )


def write(stream: Any, text: str) -> None:
    """Write to a stream of the driver's, as far as it is still there."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return  # the terminal has gone, or the stream is closed: no reason to end a training


def is_terminal() -> bool:
    """Whether stderr is one."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
