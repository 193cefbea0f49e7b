"""What a driver tells of, for tests that drive it by hand."""

from __future__ import annotations

from collections.abc import Callable

from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunLog
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.sinks.sink import Sink


def telling(*sinks: Sink, run: Run | None = None) -> FanOut:
    """Passes events to sinks in the calling thread, and to a run."""
    return FanOut(RunLog(run or Run("test", 1)), sinks, [], print)


def telling_threads(*sinks: Sink, notice: Callable[[str], None] = print) -> FanOut:
    """Passes events to sinks as to the user's: each in a thread of its own."""
    return FanOut(RunLog(Run("test", 1)), [], sinks, notice)
