"""What processes use, whether they have ended, and the limit that Spark sets on their memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")  # of the clock in /proc, in a second
# Not in a kernel that was built without it.
_LISTS_CHILDREN: Final = os.path.exists("/proc/thread-self/children")


def lift_address_space() -> int | None:
    """Lift the limit that ``spark.executor.pyspark.memory`` sets on this process's address space.

    Processes that it starts inherit the limit, and frameworks map several GiB that they never use.

    Returns:
        The limit in bytes if it stays: to lift it takes CAP_SYS_RESOURCE. None if there is none.
    """
    if int(os.environ.get("PYSPARK_EXECUTOR_MEMORY_MB", "-1")) <= 0:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


class Use(NamedTuple):
    """The memory and CPU time that a process has used so far.

    Attributes:
        memory: bytes that it has in memory now. Processes that share pages count them each.
        cpu: CPU seconds, with those of its children that have ended.
        faults: pages that it waited for, from a disk; with those of its children that have ended.
    """

    pid: int
    memory: int
    cpu: float
    faults: int


def family(pid: int) -> list[Use]:
    """A process, first, and all its descendants; empty if it has ended."""
    found: list[Use] = []
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        with suppress(OSError, ValueError, IndexError, psutil.Error):
            # The children first: one that ends right after this is among its parent's times.
            children = list(_children(each))
            found.append(use(each))
            waiting += children
    return found


def use(pid: int) -> Use:
    """Read what a process has used. Raises an OSError if it does not exist."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in brackets, may hold anything. See proc(5) for what comes after it.
        fields = file.read().rpartition(b")")[2].split()
    ticks = sum(map(int, fields[11:15]))
    faults = int(fields[9]) + int(fields[10])
    return Use(pid, int(fields[21]) * _PAGE, ticks / _TICKS, faults)


def wait_for_end(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until processes have ended; returns those that still run after that time.

    A zombie counts as ended. psutil's own wait may raise an OSError, of `pidfd_open`, for a process
    that ends at that moment, see https://github.com/giampaolo/psutil/issues/2715.
    """
    deadline = time.monotonic() + seconds
    left = [process for process in processes if _runs(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if _runs(process)]
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> Iterator[int]:
    """The children of a process, without a look at all processes of the host."""
    if not _LISTS_CHILDREN:
        yield from (child.pid for child in psutil.Process(pid).children())
        return
    for thread in os.listdir(f"/proc/{pid}/task"):
        with (
            suppress(FileNotFoundError, ProcessLookupError),  # the thread has ended
            open(f"/proc/{pid}/task/{thread}/children", "rb") as file,
        ):
            yield from map(int, file.read().split())
