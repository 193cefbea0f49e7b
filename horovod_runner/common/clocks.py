"""A clock that nobody sets, for the moments of a run; and how long threads have run.

A machine's clock is set while a run lasts: by NTP, or when a virtual machine resumes. Moments by
that clock would change their order, and differences of them would be wrong by as much.
"""

from __future__ import annotations

import os
import time
from typing import Final


class SteadyClock:
    """Seconds since the Unix epoch, by the machine's clock as it was when this object was made.

    Later changes of the machine's clock do not matter. The time that a machine sleeps counts.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Read the machine's clock again."""
        self._ahead = time.time() - elapsed()

    def __call__(self) -> float:
        """The present moment."""
        return self._ahead + elapsed()


def elapsed() -> float:
    """Seconds since the machine was started; only for differences."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def scheduled(thread: int, process: int | str = "self") -> tuple[float, float] | None:
    """Seconds in which a thread has run, and in which it could have but had no core.

    Linux counts them (schedstats); None if it has ended, or if this kernel does not count.
    """
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return int(ran) * 1e-9, int(waited) * 1e-9


#: For a process that belongs to one run: a rank. One that is forked begins anew.
process_clock: Final = SteadyClock()
os.register_at_fork(after_in_child=process_clock.restart)
