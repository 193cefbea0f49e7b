"""Passes each event of a run to all sinks: the built-in ones directly, the user's in threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.text import encodable, without_password
from horovod_runner.common.threads import start_thread
from horovod_runner.host.folders.problems import describe
from horovod_runner.sinks.sink import Sink, call_for
from horovod_runner.wire.events import Event, Notice, Report
from horovod_runner.wire.measurements import Lines, Profile

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.results.run_log import RunLog

_IDLE_SECONDS: Final = 1.0
_MAX_QUEUED: Final = 100_000  # events
_MAX_QUEUED_BYTES: Final = 64 << 20  # of output and reports, roughly
# Calls that are never dropped.
_LAST: Final = ("attempt", "end")
_FULL: Final = "The disk is full: free space, or give the sink another place."


class FanOut:
    """Passes each event to the log, then to all sinks. Each sink of the user has its own thread."""

    def __init__(
        self,
        log: RunLog,
        direct: Sequence[Sink],
        threaded: Iterable[Sink],
        notice: Callable[[str], None],
        *,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._limits = limits
        self._log = log
        self._direct = direct
        self._threads = [_SinkThread(sink, notice) for sink in threaded]

    def begin(self, run: Run) -> None:
        """The run begins."""
        self._pass_on(_SinkCall("begin", (run,)))

    def tell(self, event: Event) -> None:
        """Pass on an event."""
        if isinstance(event, Report):
            self.reports([event])
            return
        if isinstance(event, Notice):
            event = Notice(encodable(without_password(event.text)))
        self._log.add([event])
        if (call := call_for(event)) is not None:
            self._pass_on(_SinkCall(*call, event.kept))

    def reports(self, reports: Sequence[Report]) -> None:
        """Pass on several reports of one rank."""
        self._log.add(reports)
        for sink in self._direct:
            sink.reports(reports)
        for thread in self._threads:
            for report in reports:
                thread.put(_SinkCall("report", (report,), report.kept))

    def notice(self, text: str) -> None:
        """Tell the user something."""
        self.tell(Notice(text))

    def idle(self) -> None:
        """Called at least once a second."""
        self._log.idle()
        for sink in self._direct:
            sink.idle()

    def end(self, run: Run) -> None:
        """The run has ended."""
        self._pass_on(_SinkCall("end", (run,)))

    def _pass_on(self, call: _SinkCall) -> None:
        for sink in self._direct:
            call.make(sink)
        for thread in self._threads:
            thread.put(call)

    def close(self) -> None:
        """Wait until the user's sinks have handled all events, as long as the limits allow."""
        deadline = time.monotonic() + self._limits.sinks
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.wait(deadline, self._limits)


class _SinkCall(NamedTuple):
    """A call of a sink's method."""

    method: str
    arguments: tuple[Any, ...]
    kept: str = "all"

    def make(self, sink: Sink) -> None:
        """Call the method, if the sink has it."""
        if (method := getattr(sink, self.method, None)) is not None:
            method(*self.arguments)

    @property
    def may_be_dropped(self) -> bool:
        """Whether there are many of its kind; others are dropped if the queue is twice as long."""
        return self.kept != "all"

    @property
    def is_measured(self) -> bool:
        """Whether ranks send it all the time; most sinks have no method for these."""
        return self.kept in ("latest", "last")

    @property
    def bytes(self) -> int:
        """What its arguments take, roughly."""
        match self.arguments[-1:]:
            case (str() as text,):
                return len(text)
            case (Report() as report,):
                return 100 * len(report.metrics)
            case (Profile() as profile,):
                return 200 * len(profile.arrivals)
            case (Lines() as lines,):
                return 100 * (len(lines.calls) + len(lines.stacks))
            case (list() as ranks,):
                return 100 * len(ranks)
        return 0


class _SinkThread:
    """Calls one sink in a separate thread: the sink may be slow, wait for a server, or fail."""

    def __init__(self, sink: Sink, notice: Callable[[str], None]) -> None:
        self._sink = sink
        self._name = type(sink).__name__
        self._notice = notice
        self._calls: deque[_SinkCall] = deque()
        self._changed = threading.Condition()
        self._bytes = 0  # in the queue, roughly
        self._closed = False
        self._dropped = 0  # reports, lines and measurements
        self._dropped_rest = 0
        try:
            _SinkCall("prepare", ()).make(sink)
        except Exception as error:
            self._give_up("prepare", error)
        self._thread = start_thread(f"sink-{self._name}", self._work)

    def put(self, call: _SinkCall) -> None:
        if call.is_measured and not self._hears(call.method):
            return  # there may be thousands in a second
        with self._changed:
            if self._closed:
                return
            share = max(len(self._calls) / _MAX_QUEUED, self._bytes / _MAX_QUEUED_BYTES)
            if call.method not in _LAST and share >= (1 if call.may_be_dropped else 2):
                self._dropped += call.may_be_dropped
                self._dropped_rest += not call.may_be_dropped
                return
            self._calls.append(call)
            self._bytes += call.bytes
            self._changed.notify()

    def _hears(self, name: str) -> bool:
        """Whether the sink has a method of its own for an event."""
        method = getattr(self._sink, name, None)
        return method is not None and getattr(method, "__func__", method) is not vars(Sink)[name]

    def _work(self) -> None:
        idle_called = True
        while True:
            with self._changed:
                while not self._calls:
                    if self._closed:
                        return
                    if not self._changed.wait(None if idle_called else _IDLE_SECONDS):
                        break
                call = self._calls.popleft() if self._calls else _SinkCall("idle", ())
                self._bytes -= call.bytes
            idle_called = call.method in ("idle", "end")
            try:
                call.make(self._sink)
            except Exception as error:
                self._give_up(call.method, error)
                return

    def _give_up(self, method: str, error: Exception) -> None:
        text = str(error)
        if "[Errno" in text:  # of a store that cannot be written, for example
            name = getattr(error, "filename", None)
            folder = Path(name).parent if isinstance(name, str) else None
            text = describe(error, otherwise="", folder=folder, full=_FULL)
        self._notice(
            f"the sink {self._name} failed in {method}() and receives nothing more of this run: "
            f"{type(error).__name__}: {text}"
        )
        with self._changed:
            self._closed = True
            self._calls.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self, deadline: float, limits: Limits) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                queued = len(self._calls)
                kept = [call for call in self._calls if not call.may_be_dropped]
                self._calls = deque(kept)
            self._notice(
                f"the sink {self._name} is still busy {limits.sinks:g} s after the end of the "
                f"run: {queued - len(kept) + self._dropped} reports and lines are dropped"
                f"{self._rest_text()}. It handles the other events for as long as this process "
                "lives. It is slower than reports arrive: report less often"
            )
            self._thread.join(limits.sink_rest)
        elif self._dropped or self._dropped_rest:
            self._notice(
                f"the sink {self._name} was too slow: {self._dropped} reports and lines were "
                f"dropped{self._rest_text()}. Report less often"
            )

    def _rest_text(self) -> str:
        return f", and {self._dropped_rest} other events" if self._dropped_rest else ""
