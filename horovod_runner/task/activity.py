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
_CLOCK_STEP_SECONDS = 0.011  # the counters have steps of 10 ms


class _Used(NamedTuple):
    """A thread's seconds since its start, or since the last measurement."""

    busy: float
    waiting: float  # for a core

    def since(self, before: _Used) -> _Used:
        return _Used(self.busy - before.busy, self.waiting - before.waiting)


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
        self._threads: dict[int, _Used] = {}
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
            thread.id: _Used(thread.user_time + thread.system_time, _waiting(self._pid, thread.id))
            for thread in process.threads()
        }
        nothing = _Used(0, 0)
        used = {id_: now.since(before.get(id_, nothing)) for id_, now in self._threads.items()}
        idle_limit = max(_CLOCK_STEP_SECONDS, _MAIN_SHARE * elapsed)
        worked = used.pop(self._pid, nothing).busy > idle_limit
        worked = worked or any(
            each.busy > max(_CLOCK_STEP_SECONDS, _THREAD_SHARE * (elapsed - each.waiting))
            for each in used.values()
        )
        children, self._children = self._children, {}
        if not worked:  # otherwise the children's counters are not needed
            for child in process.children(recursive=True):
                times = child.cpu_times()
                self._children[child.pid] = times.user + times.system
            worked = sum(self._children.values()) - sum(children.values()) > idle_limit
        return worked


def _waiting(pid: int, thread: int) -> float:
    """For how many seconds a thread has waited for a core since its start; 0 if unknown."""
    try:
        counters = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text("ascii").split()
        return int(counters[1]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or this kernel does not count
        return 0.0
