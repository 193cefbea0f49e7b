"""The CPU cores and memory that a container or resource manager leaves to a process.

Linux's control groups say it, in two versions: cgroups(7). A limit of a group holds for all groups
below it, so a process has those of its own group and of all above it. A process whose group cannot
be read has the limits of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import psutil

_ROOT: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
_SHORT_SHARE: Final = 0.05  # of the host's or the container's memory


class MemoryLimit(NamedTuple):
    """A limit of memory, in bytes.

    Attributes:
        free: what is left of it before the kernel ends a process, with what the kernel can drop: a
            cache of files that no disk needs any more.
    """

    limit: int
    free: int
    in_container: bool = False


class CpuTime(NamedTuple):
    """Counters of a control group with a CPU quota.

    Attributes:
        used: CPU seconds of its processes; 0 where the kernel does not tell.
        throttled: seconds in which the quota stopped them, added up over the cores on which they
            ran.
    """

    used: float = 0.0
    throttled: float = 0.0


class ControlGroups:
    """Reads how many cores and how much memory control groups leave to a process."""

    def __init__(self, root: Path = _ROOT, proc: Path = _PROC) -> None:
        self._root = root
        self._proc = proc

    def available_cores(self) -> int:
        """The cores that this process may use: its affinity, and its container's quota."""
        cores = len(os.sched_getaffinity(0))
        return max(1, min([cores, *map(int, self._cpu_quotas(None))]))

    def cpu_quota(self, pid: int | None = None) -> float | None:
        """The cores that a container's quota leaves to a process; None without a quota."""
        return min(self._cpu_quotas(pid), default=None)

    def cpu_time(self, pid: int | None = None) -> CpuTime:
        """The counters of the control group of a process that was throttled for longest."""
        longest = CpuTime()
        for version, folder in self._groups("cpu", pid):
            with suppress(OSError, ValueError, KeyError):
                counters = _counters(folder / "cpu.stat")
                if version == 2:
                    found = CpuTime(
                        counters["usage_usec"] * 1e-6, counters.get("throttled_usec", 0) * 1e-6
                    )
                else:
                    used = 0
                    with suppress(OSError):  # often, but not always, mounted together
                        used = int((folder / "cpuacct.usage").read_text())
                    found = CpuTime(used * 1e-9, counters["throttled_time"] * 1e-9)
                longest = max(longest, found, key=lambda time: time.throttled)
        return longest

    def memory(self, pid: int | None = None) -> MemoryLimit:
        """The limit, the host's or a container's, of which a process has the least memory left."""
        return min(self._memory_limits(pid), key=lambda each: each.free)

    def memory_for_files(self) -> int:
        """How many bytes the system can use to cache files."""
        host, *containers = self._memory_limits(None)
        return min([host.free, *(each.limit for each in containers)])

    def memory_is_short(self, share: float = _SHORT_SHARE) -> bool:
        """Whether the host, or this container, has less than a share of its memory left."""
        return any(each.free < share * each.limit for each in self._memory_limits(None))

    def process_limit(self) -> int | None:
        """How many processes and threads the container may have; None without a limit."""
        limits = []
        for _, folder in self._groups("pids", None):
            with suppress(OSError, ValueError):  # "max" is not a number
                limits.append(int((folder / "pids.max").read_text()))
        return min(limits, default=None)

    def kill_counter(self, pid: int | None = None) -> Path:
        """The file that counts the processes which the kernel ended because memory was used up.

        It counts those of a process's container, or of the host where there is none.
        """
        for version, folder in self._groups("memory", pid):
            path = folder / ("memory.events" if version == 2 else "memory.oom_control")
            if path.exists():
                return path
        return self.host_kill_counter()

    def host_kill_counter(self) -> Path:
        """The file that counts the same for the whole host."""
        return self._proc / "vmstat"

    def _cpu_quotas(self, pid: int | None) -> Iterator[float]:
        """The CPU quotas that apply to a process, in cores."""
        for version, folder in self._groups("cpu", pid):
            with suppress(OSError, ValueError):  # "max" is not a number
                if version == 2:
                    limit, period = map(int, (folder / "cpu.max").read_text().split())
                else:
                    limit = int((folder / "cpu.cfs_quota_us").read_text())
                    period = int((folder / "cpu.cfs_period_us").read_text())
                if limit > 0:
                    yield limit / period

    def _memory_limits(self, pid: int | None) -> Iterator[MemoryLimit]:
        host = psutil.virtual_memory()
        yield MemoryLimit(host.total, host.available)
        for version, folder in self._groups("memory", pid):
            limit_name, used_name = (
                ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
            )
            with suppress(OSError, ValueError):  # "max" is not a number
                limit = int((folder / f"memory.{limit_name}").read_text())
                if limit >= host.total:  # version 1 has no word for no limit
                    continue
                used = int((folder / f"memory.{used_name}").read_text())
                counters = _counters(folder / "memory.stat")
                cache = sum(
                    # Version 1 counts the groups below under these names alone.
                    counters.get(f"total_{name}", counters.get(name, 0))
                    for name in ("inactive_file", "active_file", "slab_reclaimable")
                )
                yield MemoryLimit(limit, max(0, limit - used + cache), in_container=True)

    def _groups(self, controller: str, pid: int | None) -> Iterator[tuple[int, Path]]:
        """The version and folder of each control group of a process, the innermost first."""
        try:
            lines = (self._proc / str(pid or "self") / "cgroup").read_text().splitlines()
        except OSError:  # the process has ended
            return
        for line in lines:
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = self._root / controllers if controllers else self._root
            if controllers and not root.is_dir():
                root = self._root / controller  # the controllers may be in another order
            elif not controllers and (root / "unified").is_dir():
                root = root / "unified"  # beside controllers of version 1
            inside = PurePosixPath(group.lstrip("/"))
            # A container may see its own group as the root, and what is above it not at all.
            above = [] if ".." in inside.parts else [inside, *inside.parents]
            for each in above or [PurePosixPath()]:
                yield (1 if controllers else 2), root / each


def killed_for_memory(path: Path) -> int | None:
    """Read a file of :func:`kill_counter`; None where the kernel does not count."""
    try:
        return _counters(path)["oom_kill"]
    except (OSError, ValueError, KeyError):
        return None


def _counters(path: Path) -> dict[str, int]:
    """The counters of a file with a name and a number in each line."""
    words = path.read_text().split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


_here: Final = ControlGroups()
available_cores = _here.available_cores
cpu_quota = _here.cpu_quota
cpu_time = _here.cpu_time
memory = _here.memory
memory_for_files = _here.memory_for_files
memory_is_short = _here.memory_is_short
process_limit = _here.process_limit
kill_counter = _here.kill_counter
host_kill_counter = _here.host_kill_counter
