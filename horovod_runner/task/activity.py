"""Measures for how long a worker process has been idle, from the system's own counters.

The Python part of a training works in bursts. A worker counts as idle when its main thread and its
child processes use no CPU time, and none of its other threads is busy: Horovod's two threads poll a
thousand times a second at all times.
"""

from __future__ import annotations

import time

import psutil

from horovod_runner.wire.messages import Alive

_MAIN_SHARE = 0.01  # of a core
_THREAD_SHARE = 0.15  # of a core; Horovod's threads take up to 0.11 each
_CLOCK_STEP_SECONDS = 0.011  # the counters have steps of 10 ms


class Activity:
    """Watches one process.

    Args:
        pid: the process.
        interval: the least number of seconds between two measurements.
    """

    def __init__(self, pid: int, interval: float) -> None:
        self._pid = pid
        self._interval = interval
        self._printed_at = self._worked_at = self._measured_at = time.monotonic()
        self._threads: dict[int, float] = {}
        self._children: dict[int, float] = {}
        self._frozen = False

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
        self._frozen = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        before = self._threads
        self._threads = {
            thread.id: thread.user_time + thread.system_time for thread in process.threads()
        }
        used = {id_: total - before.get(id_, 0.0) for id_, total in self._threads.items()}
        idle_limit = max(_CLOCK_STEP_SECONDS, _MAIN_SHARE * elapsed)
        worked = used.pop(self._pid, 0.0) > idle_limit
        worked = worked or any(seconds > _THREAD_SHARE * elapsed for seconds in used.values())
        children, self._children = self._children, {}
        if not worked:  # otherwise the children's counters are not needed
            for child in process.children(recursive=True):
                times = child.cpu_times()
                self._children[child.pid] = times.user + times.system
            worked = sum(self._children.values()) - sum(children.values()) > idle_limit
        return worked
