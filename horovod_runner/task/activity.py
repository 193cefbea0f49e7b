"""Measures for how long a worker process has been idle, from the system's own counters.

The Python part of a training works in bursts. A worker counts as idle when its main thread and its
child processes use no CPU time, and none of its other threads is busy: Horovod's two threads poll a
thousand times a second at all times. The time for which a thread waited for a core does not count:
on a crowded machine a busy thread gets little of one, too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import psutil

from horovod_runner.wire.messages import Alive

_MAIN_SHARE = 0.01  # of a core
_THREAD_SHARE = 0.15  # of a core, while it had one; Horovod's threads take up to 0.11 each
_CLOCK_STEP_SECONDS = 0.011  # psutil's counters have steps of 10 ms
_LEAST_SECONDS = 0.002  # of the finer counters


class _Thread(NamedTuple):
    """What is known of a thread.

    Attributes:
        busy: seconds on a core since its start.
        waiting: seconds for which it waited for a core.
        at: when this was measured.
        worked: whether it was busy before that.
    """

    busy: float
    waiting: float
    at: float
    worked: bool = False


class Activity:
    """Watches one process.

    Args:
        pid: the process.
        interval: the least number of seconds between two measurements.

    Attributes:
        ended_at: when it was first seen as a process that has ended, and that its parent has not
            taken notice of, in seconds of the monotonic clock; None otherwise.
    """

    def __init__(self, pid: int, interval: float) -> None:
        self._pid = pid
        self._interval = interval
        self._printed_at = self._worked_at = self._measured_at = time.monotonic()
        self._threads: dict[int, _Thread] = {}  # without the main one
        self._main_time = 0.0
        self._children: dict[int, float] = {}
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
            if self._has_worked(psutil.Process(self._pid), elapsed):
                self._worked_at = now
        except psutil.Error:  # it has ended, or its counters cannot be read
            self._worked_at = now
        self._measured_at = now

    def _has_worked(self, process: psutil.Process, elapsed: float) -> bool:
        status = process.status()
        self._frozen = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        if status == psutil.STATUS_ZOMBIE:
            self.ended_at = self.ended_at or time.monotonic()
            return True
        used = {each.id: each.user_time + each.system_time for each in process.threads()}
        idle_limit = max(_CLOCK_STEP_SECONDS, _MAIN_SHARE * elapsed)
        main_time, self._main_time = self._main_time, used.get(self._pid, 0.0)
        worked = self._main_time - main_time > idle_limit
        self._threads = {
            each: self._measure_thread(each, time)
            for each, time in used.items()
            if each != self._pid
        }
        worked = worked or any(thread.worked for thread in self._threads.values())
        children, self._children = self._children, {}
        if not worked:  # otherwise the children's counters are not needed
            for child in process.children(recursive=True):
                times = child.cpu_times()
                self._children[child.pid] = times.user + times.system
            worked = sum(self._children.values()) - sum(children.values()) > idle_limit
        return worked

    def _measure_thread(self, thread: int, time_used: float) -> _Thread:
        """Judge a thread by its share of the time in which it could have had a core.

        The system counts a wait for a core when it is over.
        """
        now = time.monotonic()
        schedule = _schedule(self._pid, thread)
        least = _CLOCK_STEP_SECONDS if schedule is None else _LEAST_SECONDS
        busy, waiting = schedule or (time_used, 0.0)
        before = self._threads.get(thread, _Thread(0.0, 0.0, self._measured_at))
        if (busy, waiting) == (before.busy, before.waiting) and _is_runnable(self._pid, thread):
            return before  # it has waited for a core all the time
        could = now - before.at - (waiting - before.waiting)
        worked = busy - before.busy > max(least, _THREAD_SHARE * could)
        return _Thread(busy, waiting, now, worked)


def _schedule(pid: int, thread: int) -> tuple[float, float] | None:
    """A thread's seconds on a core and those it waited for one; None if unknown."""
    try:
        counters = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text("ascii").split()
        return int(counters[0]) / 1e9, int(counters[1]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or this kernel does not count
        return None


def _is_runnable(pid: int, thread: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["R"]
