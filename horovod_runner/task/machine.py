"""Reads the counters of the machine under a rank: cores, memory, disk and network."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

from horovod_runner.host import limits
from horovod_runner.wire.measurements import Machine

_SECONDS: Final = 5.0  # between two readings, which take a few milliseconds


class MachineWatch:
    """Watches the host of one rank and the processes of its worker.

    Args:
        rank: the rank's number.
        pid: the worker's.
    """

    def __init__(self, rank: int, pid: int) -> None:
        self._rank = rank
        self._pid = pid
        self._before = _read()
        self._faults = 0

    def measure(self) -> Machine | None:
        """What happened since the last measurement; None if that was a moment ago."""
        if time.monotonic() - self._before.time < _SECONDS:
            return None
        before, now = self._before, _read()
        self._before = now
        seconds = now.time - before.time
        memory, faults = self._of_worker()
        new_faults, self._faults = max(0, faults - self._faults), faults
        return Machine(
            self._rank,
            time.time(),
            seconds,
            max(0.0, now.busy - before.busy) / seconds,
            limits.available_cores(),
            max(0.0, now.throttled - before.throttled),
            memory,
            limits.free_memory(),
            new_faults,
            max(0, now.swapped - before.swapped),
            max(0, now.disk - before.disk),
            max(0, now.network - before.network),
        )

    def _of_worker(self) -> tuple[int, int]:
        """Bytes of memory and major page faults of the worker and its children."""
        memory = faults = 0
        with suppress(psutil.Error):
            worker = psutil.Process(self._pid)
            for process in (worker, *worker.children(recursive=True)):
                with suppress(psutil.Error, OSError, IndexError, ValueError):
                    memory += process.memory_info().rss
                    faults += _major_faults(process.pid)
        return memory, faults


class _Counters(NamedTuple):
    """Counters of the host at a moment; see messages.Machine."""

    time: float
    busy: float
    throttled: float
    swapped: int
    disk: int
    network: int


def _read() -> _Counters:
    cpu = psutil.cpu_times()
    idle = cpu.idle + getattr(cpu, "iowait", 0.0)
    # Guests are among the users' times already.
    busy = sum(cpu) - idle - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
    swap, disk = psutil.swap_memory(), psutil.disk_io_counters()
    interfaces = psutil.net_io_counters(pernic=True)
    return _Counters(
        time.monotonic(),
        busy,
        limits.throttled_seconds(),
        swap.sin + swap.sout,
        0 if disk is None else disk.read_bytes + disk.write_bytes,
        sum(n.bytes_sent + n.bytes_recv for name, n in interfaces.items() if name != "lo"),
    )


def _major_faults(pid: int) -> int:
    """Major page faults of a process so far: the twelfth field of /proc/PID/stat, see proc(5)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[9])
