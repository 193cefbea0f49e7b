"""Reads the counters of the host: cores, swap, disks, network, and who waits for them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

_ROOT: Final = Path("/")
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108
_CPUS: Final = Path("sys", "devices", "system", "cpu")
_READ_CPUS: Final = 8  # whose frequency is read: each takes some microseconds


class Counters(NamedTuple):
    """The counters of a host since it started.

    Attributes:
        busy: seconds in which its cores computed, added up.
        io_wait: seconds in which a core was idle while a process waited for a disk.
        stolen: seconds in which a virtual machine's cores waited for a core of its host.
        swapped: bytes that were moved to or from swap.
        disk: bytes that were read and written.
        received, sent: bytes over all interfaces but loopback.
        cpu_stall, memory_stall, io_stall: seconds in which some process waited for a core, for
            memory that was moved out, or for a disk; 0 where the kernel does not count them.
        hot: seconds in which the processors were slowed because they were hot; the hottest one's.
    """

    busy: float
    io_wait: float
    stolen: float
    swapped: int
    disk: int
    received: int
    sent: int
    cpu_stall: float
    memory_stall: float
    io_stall: float
    hot: float


def read(root: Path = _ROOT) -> Counters:
    """Read all counters; takes less than two milliseconds."""
    cpu = psutil.cpu_times()
    io_wait, stolen = getattr(cpu, "iowait", 0.0), getattr(cpu, "steal", 0.0)
    # Guests are among the users' times already.
    guests = getattr(cpu, "guest", 0.0) + getattr(cpu, "guest_nice", 0.0)
    swap, disk = psutil.swap_memory(), psutil.disk_io_counters()
    interfaces = psutil.net_io_counters(pernic=True)
    outside = [counts for name, counts in interfaces.items() if name != "lo"]
    return Counters(
        sum(cpu) - cpu.idle - io_wait - stolen - guests,
        io_wait,
        stolen,
        swap.sin + swap.sout,
        0 if disk is None else disk.read_bytes + disk.write_bytes,
        sum(counts.bytes_recv for counts in outside),
        sum(counts.bytes_sent for counts in outside),
        _stall(root, "cpu"),
        _stall(root, "memory"),
        _stall(root, "io"),
        _hot(root / _CPUS),
    )


def frequency(root: Path = _ROOT) -> float:
    """The mean frequency of some cores that this process may use, in MHz; 0 if it is not known."""
    found = []
    for cpu in _own_cpus()[:_READ_CPUS]:
        with suppress(OSError, ValueError):
            text = (root / _CPUS / f"cpu{cpu}/cpufreq/scaling_cur_freq").read_text()
            found.append(int(text) / 1000)
    return sum(found) / len(found) if found else 0.0


def shared_memory() -> int:
    """The bytes in /dev/shm, where DataLoader workers and MPI put what they share."""
    with suppress(OSError):
        return shutil.disk_usage(_SHARED_MEMORY).used
    return 0


def free_shared_memory() -> int:
    """The free bytes in /dev/shm; -1 where the system does not tell."""
    with suppress(OSError):
        return shutil.disk_usage(_SHARED_MEMORY).free
    return -1


def _stall(root: Path, resource: str) -> float:
    """Seconds in which some process waited for a resource: Linux's pressure stall information."""
    with suppress(OSError, ValueError, IndexError):
        some = (root / "proc" / "pressure" / resource).read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) * 1e-6
    return 0.0


def _hot(cpus: Path) -> float:
    longest = 0
    for cpu in _own_cpus()[:: max(1, len(_own_cpus()) // _READ_CPUS)]:
        with suppress(OSError, ValueError):
            path = cpus / f"cpu{cpu}/thermal_throttle/package_throttle_total_time_ms"
            longest = max(longest, int(path.read_text()))
    return longest * 1e-3


def _own_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))
