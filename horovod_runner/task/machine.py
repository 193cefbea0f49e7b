"""Measures what the machine under a rank does: its cores, memory, disks, network and GPUs."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import msgspec
import psutil

from horovod_runner.common.clocks import SteadyClock
from horovod_runner.common.slots import Slot
from horovod_runner.host import control_groups, counters, processes
from horovod_runner.host.counters import Counters
from horovod_runner.host.gpu_meter import GpuMeter
from horovod_runner.task.memory import MemoryWatch
from horovod_runner.wire.measurements import Machine

_SECONDS: Final = 5.0  # between two readings, which take a few milliseconds
# The first rank of a host reads a little later: the driver then has what the others' processes use.
_LATER_SECONDS: Final = 0.5


class MachineWatch:
    """Measures the host of one rank and the processes of its worker.

    The counters of the host are read beside its first rank alone. Those of control groups are read
    beside each rank, because a resource manager may give each a group of its own.

    Args:
        guard: the process that started the worker, and adopts what the worker leaves behind.
    """

    def __init__(self, slot: Slot, pid: int, guard: int, memory: MemoryWatch) -> None:
        self._slot = slot
        self._pid = pid
        self._guard = guard
        self._memory = memory
        self._is_first = slot.local_rank == 0
        self._clock = SteadyClock()
        self._gpus: GpuMeter | None = None
        self._kills = control_groups.kill_counter(pid)
        self._before = self._read(None)
        self._due = self._before.time + _SECONDS + (_LATER_SECONDS if self._is_first else 0.0)

    def measure(self) -> Machine | None:
        """Measure the time since the last measurement; None if that was a moment ago."""
        if time.monotonic() < self._due:
            return None
        before, now = self._before, self._read(self._before)
        self._before, self._due = now, now.time + _SECONDS
        seconds = now.time - before.time
        use = self._memory.use
        if use is None:
            return None
        if self._gpus is None:  # not before the worker, which starts the driver of its GPUs
            self._gpus = GpuMeter(self._slot.gpus)
        gpus = self._gpus.read()
        slot = self._slot
        machine = Machine(
            slot.rank,
            self._clock(),
            seconds,
            of_cores=control_groups.available_cores(),
            throttled=_throttled(before.group, now.group, seconds),
            memory=use.worker + use.children,
            free_memory=use.free,
            faults=now.faults - before.faults,
            host_rank=slot.rank - slot.local_rank,
            own_cores=(now.cpu - before.cpu) / seconds,
            quota=control_groups.cpu_quota(self._pid) or 0.0,
            memory_limit=use.limit,
            children_memory=use.children,
            grown=use.grown,
            shared_memory=use.shared,
            gpus=gpus.readable,
            gpu_busy=gpus.busy,
            gpu_memory=gpus.memory,
            gpu_memory_limit=gpus.memory_limit,
            gpus_slowed=gpus.slowed,
            killed=now.killed - before.killed,
        )
        if before.host is None or now.host is None:
            return machine
        return _with_host(machine, before.host, now.host)

    def _read(self, before: _MachineReading | None) -> _MachineReading:
        family = processes.family(self._guard)
        cpu, faults = sum(use.cpu for use in family), sum(use.faults for use in family)
        if self._is_first:  # this process is the run's, too; on the driver's machine the driver
            cpu += time.process_time()
        if before is not None:  # a process that ends while it is read is missing for once
            cpu, faults = max(cpu, before.cpu), max(faults, before.faults)
        return _MachineReading(
            time.monotonic(),
            cpu,
            faults,
            control_groups.cpu_time(self._pid),
            control_groups.killed_for_memory(self._kills) or 0,
            counters.read() if self._is_first else None,
        )


class _MachineReading(NamedTuple):
    """Counters at a moment.

    Attributes:
        cpu: CPU seconds of the rank's processes.
        faults: pages that they waited for, from a disk.
        host: None beside ranks that are not the first of their host.
    """

    time: float
    cpu: float
    faults: int
    group: control_groups.CpuTime
    killed: int
    host: Counters | None


def _throttled(
    before: control_groups.CpuTime, now: control_groups.CpuTime, seconds: float
) -> float:
    """For how long a CPU quota stopped the processes of a control group.

    The kernel adds up the cores on which it stopped them. Of all the time that they wanted to
    compute, this is the part that they did not get, applied to the whole time.
    """
    throttled, used = now.throttled - before.throttled, now.used - before.used
    if throttled <= 0:
        return 0.0
    return min(throttled, seconds * throttled / (throttled + max(0.0, used)))


def _with_host(machine: Machine, before: Counters, now: Counters) -> Machine:
    seconds = machine.seconds
    did = Counters._make(max(0, n - b) for b, n in zip(before, now, strict=True))
    return msgspec.structs.replace(
        machine,
        cores=did.busy / seconds,
        host_cores=psutil.cpu_count() or 0,
        swapped=did.swapped,
        disk=did.disk,
        network=did.received + did.sent,
        received=did.received,
        io_wait=did.io_wait / seconds,
        stolen=did.stolen / seconds,
        cpu_stall=did.cpu_stall / seconds,
        memory_stall=did.memory_stall / seconds,
        io_stall=did.io_stall / seconds,
        frequency=counters.frequency(),
        hot=did.hot / seconds,
    )
