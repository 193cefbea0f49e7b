"""How long a worker has done nothing, as the system's own counters tell.

Python's part of a training works in bursts, but it works. A worker is taken for idle when its main
thread and the processes that it started use no CPU time and none of its other threads is busy:
Horovod's own two threads look around a thousand times a second, whatever goes on.
"""

from __future__ import annotations

import time

import psutil

from horovod_runner.messages import Alive

_MAIN_SHARE = 0.01  # of a core
_THREAD_SHARE = 0.15  # Horovod's threads take up to 0.11 each


class Activity:
    """Looks at one process.

    Args:
        pid: the process.
        interval: how many seconds lie between two looks, at least.

    """

    def __init__(self, pid: int, interval: float) -> None:
        self._pid = pid
        self._interval = interval
        self._printed_at = self._worked_at = self._looked_at = time.monotonic()
        self._threads: dict[int, float] = {}
        self._children: dict[int, float] = {}
        self._frozen = False

    def touch(self) -> None:
        """The process has printed or reported something."""
        self._printed_at = time.monotonic()

    def told(self) -> Alive:
        """What is to be said of it."""
        now = time.monotonic()
        quiet = now - self._printed_at
        return Alive(quiet, min(quiet, now - self._worked_at), self._frozen)

    def look(self) -> None:
        """Read the counters, if it is time to."""
        now = time.monotonic()
        past = now - self._looked_at
        if past < self._interval:
            return
        try:
            if self._has_worked(psutil.Process(self._pid), past):
                self._worked_at = now
        except psutil.Error:  # it has ended, or hides from us
            self._worked_at = now
        self._looked_at = now

    def _has_worked(self, process: psutil.Process, past: float) -> bool:
        self._frozen = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        before = self._threads
        self._threads = {one.id: one.user_time + one.system_time for one in process.threads()}
        used = {id_: total - before.get(id_, 0.0) for id_, total in self._threads.items()}
        # The counters have steps of 10 ms.
        little = max(0.011, _MAIN_SHARE * past)
        worked = used.pop(self._pid, 0.0) > little
        worked = worked or any(one > _THREAD_SHARE * past for one in used.values())
        children, self._children = self._children, {}
        if not worked:  # else they need not be looked for
            for child in process.children(recursive=True):
                times = child.cpu_times()
                self._children[child.pid] = times.user + times.system
            worked = sum(self._children.values()) - sum(children.values()) > little
        return worked
