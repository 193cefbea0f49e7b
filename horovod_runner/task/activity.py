"""Measures for how long a worker process has been idle, from the system's own counters.

The Python part of a training works in bursts. A worker counts as idle when its main thread and its
child processes use no CPU time, and none of its other threads is busy: Horovod's two threads poll a
thousand times a second at all times. The time for which a thread waited for a core does not count:
on a crowded machine a busy thread gets little of one, too.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from horovod_runner.common.clocks import scheduled
from horovod_runner.wire.messages import Alive

_SHARE = 0.01  # of a core, while there was one for the thread
_POLL_SHARE = 0.15  # Horovod's threads take up to 0.11 each
_CLOCK_STEP_SECONDS = 0.011  # psutil's counters have steps of 10 ms
_LEAST_SECONDS = 0.002  # of the finer counters


class _Thread(NamedTuple):
    """The counters of a thread.

    Attributes:
        busy: seconds on a core since its start.
        waiting: seconds for which it waited for a core.
        worked: whether it was busy before that.
    """

    busy: float
    waiting: float
    at: float
    worked: bool = False


class Activity:
    """Watches one process.

    Args:
        interval: the least number of seconds between two measurements.

    Attributes:
        ended_at: when it was first seen as a process that has ended and that its parent has not
            reaped, in seconds of the monotonic clock; None otherwise.
    """

    def __init__(self, pid: int, interval: float) -> None:
        self._pid = pid
        self._interval = interval
        self._printed_at = self._worked_at = self._measured_at = time.monotonic()
        self._threads: dict[int, _Thread] = {}
        self._frozen = False
        self.ended_at: float | None = None

    def touch(self) -> None:
        """Note that the process has printed or reported something."""
        self._printed_at = time.monotonic()

    def heartbeat(self) -> Alive:
        """The next heartbeat: for how long the process has been quiet and idle."""
        now = time.monotonic()
        quiet = now - self._printed_at
        return Alive(quiet, min(quiet, now - self._worked_at), self._frozen)

    def measure(self) -> None:
        """Read the counters, if the interval has passed."""
        now = time.monotonic()
        elapsed = now - self._measured_at
        if elapsed < self._interval:
            return
        try:
            if self._has_worked(psutil.Process(self._pid)):
                self._worked_at = now
        except psutil.Error:  # it has ended, or its counters cannot be read
            self._worked_at = now
        self._measured_at = now

    def _has_worked(self, process: psutil.Process) -> bool:
        status = process.status()
        self._frozen = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        if status == psutil.STATUS_ZOMBIE:
            self.ended_at = self.ended_at or time.monotonic()
            return True
        known, self._threads = self._threads, {}
        worked = [
            self._measure_thread(self._pid, thread, known, self._pid != thread.id)
            for thread in process.threads()
        ]
        if any(worked):  # the children's counters are not needed
            return True
        for child in process.children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                worked += [
                    self._measure_thread(child.pid, thread, known, False)
                    for thread in child.threads()
                ]
        return any(worked)

    def _measure_thread(
        self, pid: int, thread: Any, known: dict[int, _Thread], polls: bool
    ) -> bool:
        """Whether a thread was busy, by its share of the time in which it could have had a core.

        The system counts a wait for a core when it is over. Horovod's threads poll, which takes
        some of a core without any work: a thread that may be one is busy from a larger share on.
        """
        now = time.monotonic()
        schedule = scheduled(thread.id, pid)
        least = _CLOCK_STEP_SECONDS if schedule is None else _LEAST_SECONDS
        busy, waiting = schedule or (thread.user_time + thread.system_time, 0.0)
        before = known.get(thread.id, _Thread(0.0, 0.0, self._measured_at))
        could = now - before.at - (waiting - before.waiting)
        worked = busy - before.busy > max(least, (_POLL_SHARE if polls else _SHARE) * could)
        if not worked and _is_runnable(pid, thread.id):
            self._threads[thread.id] = before  # it waits for a core, for an unknown time
            return before.worked
        self._threads[thread.id] = _Thread(busy, waiting, now, worked)
        return worked


def _is_runnable(pid: int, thread: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["R"]
