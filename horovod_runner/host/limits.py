"""The CPU cores and memory that a container or resource manager leaves to this process.

Linux's control groups say it, in two versions: cgroups(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_SHORT_SHARE: Final = 0.05  # of the host's or the container's memory


def available_cores() -> int:
    """The cores that this process may use: its affinity, and its container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, min([cores, *map(int, _cpu_quotas())]))


def memory_for_files() -> int:
    """How many bytes the system can use to cache files."""
    return min([psutil.virtual_memory().available, *(limit for limit, _ in _memory_limits())])


def memory_is_short() -> bool:
    """Whether the host, or this container, has less than a twentieth of its memory left."""
    host = psutil.virtual_memory()
    left = [(host.total, host.available), *_memory_limits()]
    return any(free < _SHORT_SHARE * limit for limit, free in left)


def throttled_seconds() -> float:
    """For how long the container's CPU quota has stopped its processes so far."""
    longest = 0.0
    for version, folder in _groups("cpu"):
        with suppress(OSError, ValueError, KeyError):
            counters = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            value = counters["throttled_usec"] if version == 2 else counters["throttled_time"]
            longest = max(longest, int(value) * (1e-6 if version == 2 else 1e-9))
    return longest


def free_memory() -> int:
    """The bytes that the host, or this container, has left before the kernel ends a process."""
    host = psutil.virtual_memory()
    return min([host.available, *(free for _, free in _memory_limits())])


def _cpu_quotas() -> Iterator[float]:
    """The CPU quotas that apply to this process, in cores."""
    for version, folder in _groups("cpu"):
        with suppress(OSError, ValueError):  # "max" is not a number
            if version == 2:
                limit, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                limit = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if limit > 0:
                yield limit / period


def _memory_limits() -> Iterator[tuple[int, int]]:
    """The memory limits that apply to this process, each with what is left of it, in bytes."""
    for version, folder in _groups("memory"):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        with suppress(OSError, ValueError, KeyError):  # "max" is not a number
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
            lines = (folder / "memory.stat").read_text().splitlines()
            counters = dict(line.split() for line in lines)
            yield limit, limit - used + int(counters["inactive_file"])


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """The version and folder of each control group of this process that limits something."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controllers if controllers else _ROOT
        for folder in (root / group.lstrip("/"), root):  # a container may see its own as the root
            yield (1 if controllers else 2), folder
