"""Watches the memory that is left for a rank, and warns before the kernel ends a process.

A warning needs little free memory and growth that goes on: a training that has taken most of the
memory and stays there is not warned of. What is only a cache of files counts as free.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from horovod_runner.common.slots import Slot
from horovod_runner.host import control_groups, counters, processes
from horovod_runner.wire.measurements import MemoryShort, MemoryUse

_LOOK_SECONDS: Final = 1.0
# Between two readings of all processes. Where more than _MUCH of the memory is used they are read
# at each look.
_PROCESSES_SECONDS: Final = 5.0
_MUCH: Final = 0.75
_KEPT_SECONDS: Final = 60.0
_DYING_SECONDS: Final = 3.0  # how long a killed process may take to end on a crowded machine
# Less than this is little: a share of the limit, or bytes where that is more, but of a small limit
# never more than a quarter.
_LITTLE: Final = 0.05
_LITTLE_BYTES: Final = 500 << 20
# Growth shows in the least free memory of four consecutive spans: each is below all before it, by
# similar amounts. That is rare where the use only goes up and down. For each kind of span: how many
# looks it has, and the longest time in seconds that the rest may last for a warning. The first
# notices fast growth within seconds, the other one slow growth minutes before the end.
_SPANS: Final = ((1, 60.0), (20, 300.0))
_IN_A_ROW: Final = 4
_ALIKE: Final = 0.5  # the smallest fall, of the largest
_MOST_LOOKS: Final = _IN_A_ROW * max(count for count, _ in _SPANS)


def seconds_left(looks: Sequence[tuple[float, int]], limit: int, lowest: int) -> float | None:
    """How many seconds the memory lasts, if it is nearly used up more and more; None otherwise.

    Args:
        looks: times in seconds, each with the bytes that were free then; the latest last.
        limit: the bytes that may be used.
        lowest: the fewest bytes that were free before these looks.
    """
    little = min(max(_LITTLE * limit, _LITTLE_BYTES), limit / 4)
    if len(looks) < _IN_A_ROW or max(free for _, free in looks[-2:]) >= little:
        return None
    for count, longest in _SPANS:
        if len(looks) < _IN_A_ROW * count:
            break
        ends = range(len(looks) - (_IN_A_ROW - 1) * count, len(looks) + 1, count)
        lows = [min(free for _, free in looks[end - count : end]) for end in ends]
        falls = [before - after for before, after in pairwise(lows)]
        seconds = looks[-1][0] - looks[-1 - count][0]
        before = min([lowest, *(free for _, free in looks[: ends[0]])])
        if lows[1] >= before or min(falls) <= _ALIKE * max(falls) or seconds <= 0:
            continue
        left = lows[-1] / (min(falls) / seconds)
        if left < longest:
            return left
    return None


class MemoryWatch:
    """Watches the host or container of one rank, and the processes of the rank.

    Args:
        guard: the process that started the worker, and adopts what the worker leaves behind.

    Attributes:
        use: what was seen last, while the worker lived; None before that.
    """

    def __init__(
        self,
        slot: Slot,
        pid: int,
        guard: int,
        *,
        look_seconds: float = _LOOK_SECONDS,
        processes_seconds: float = _PROCESSES_SECONDS,
    ) -> None:
        self._look_seconds = look_seconds
        self._processes_seconds = processes_seconds
        self._slot = slot
        self._pid = pid
        self._guard = guard
        self._limit = 0
        self._lowest = 0
        self._looks: deque[tuple[float, int]] = deque(maxlen=_MOST_LOOKS)
        self._readings: deque[_MemoryReading] = deque()
        self._first_memory: dict[int, int] = {}
        self._warned = False
        self._due = 0.0
        self.use: MemoryUse | None = None

    def look(self) -> MemoryShort | None:
        """Look, once a second at most; returns a warning, which comes once."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + self._look_seconds
        if not _lives(self._pid):
            return None  # what it had stays known
        left = control_groups.memory(self._pid)
        if left.limit != self._limit:  # the host's memory, or another container's limit
            self._limit = self._lowest = left.limit
            self._looks.clear()
        elif len(self._looks) == _MOST_LOOKS:
            self._lowest = min(self._lowest, self._looks[0][1])
        self._looks.append((now, left.free))
        much = left.free < (1 - _MUCH) * left.limit
        since = now - self._readings[-1].time if self._readings else float("inf")
        if much or since >= self._processes_seconds:
            self._read(now)
        self.use = self._used(left)
        if self._warned:
            return None
        seconds = seconds_left(list(self._looks), left.limit, self._lowest)
        if seconds is None:
            return None
        self._warned = True
        return MemoryShort(self._slot.rank, self._slot.hostname, seconds, self.use)

    def at_end(self) -> MemoryUse | None:
        """The last reading for a worker that has ended, with its age and the killed processes."""
        if self.use is None:
            return None
        last = self._readings[-1]
        before = next(each.killed for each in self._readings if each.counter == last.counter)
        killed = _more(control_groups.killed_for_memory(last.counter), before)
        # A worker that has moved to another container since then is counted there. The last reading
        # may be of one that was killed already and had not ended yet.
        now = time.monotonic()
        alive = [each for each in self._readings if now - each.time > _DYING_SECONDS]
        of_host = _more(
            control_groups.killed_for_memory(control_groups.host_kill_counter()),
            (alive[-1] if alive else self._readings[0]).killed_on_host,
        )
        return msgspec.structs.replace(
            self.use, killed=killed or of_host, age=now - self._looks[-1][0]
        )

    def _read(self, now: float) -> None:
        family = processes.family(self._guard)
        memory = {use.pid: use.memory for use in family if use.pid != self._guard}
        # A forked process begins with the pages of the worker, which are not growth.
        worker = memory.get(self._pid, 0)
        if self._readings:
            worker = min(worker, self._readings[-1].memory.get(self._pid, worker))
        self._first_memory = {
            pid: self._first_memory.get(pid, min(size, worker)) for pid, size in memory.items()
        }
        counter = control_groups.kill_counter(self._pid)
        killed = control_groups.killed_for_memory(counter)
        on_host = control_groups.killed_for_memory(control_groups.host_kill_counter())
        self._readings.append(_MemoryReading(now, memory, counter, killed, on_host))
        while now - self._readings[0].time > _KEPT_SECONDS:
            self._readings.popleft()

    def _used(self, left: control_groups.MemoryLimit) -> MemoryUse:
        first, last = self._readings[0], self._readings[-1]
        worker = last.memory.get(self._pid, 0)
        return MemoryUse(
            left.limit,
            left.free,
            left.in_container,
            worker,
            sum(last.memory.values()) - worker,
            sum(size > 0 for pid, size in last.memory.items() if pid != self._pid),
            sum(
                size - first.memory.get(pid, self._first_memory[pid])
                for pid, size in last.memory.items()
            ),
            last.time - first.time,
            counters.shared_memory(),
        )


class _MemoryReading(NamedTuple):
    """The memory of a rank's processes at a moment.

    Attributes:
        memory: bytes by process id.
        counter, killed: see `control_groups.kill_counter`, and what it said.
        killed_on_host: the same of the whole host.
    """

    time: float
    memory: dict[int, int]
    counter: Path
    killed: int | None
    killed_on_host: int | None


def _more(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _lives(pid: int) -> bool:
    """Whether a process has memory: one that has ended has none, although it may be listed."""
    with suppress(OSError, ValueError, IndexError):
        return processes.use(pid).memory > 0
    return False
