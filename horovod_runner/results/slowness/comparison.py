"""Compares when ranks begin the same collectives: which is last, and how their clocks differ."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from horovod_runner.results.slowness.totals import RankTotals
from horovod_runner.wire.measurements import UNKNOWN, Profile

_CLOCK_SAMPLES: Final = 100
# Collectives that some ranks have not told of yet.
_MAX_PENDING: Final = 10_000


class Comparison:
    """Compares when the ranks began each collective, and adds what it finds to their totals."""

    def __init__(self, totals: Mapping[int, RankTotals]) -> None:
        self._totals = totals
        self.hosts: Sequence[str] = ()
        self.compared = 0
        self._pending: OrderedDict[int, dict[int, tuple[int, float]]] = OrderedDict()
        self._offsets: dict[int, deque[float]] = {}
        # By host: the driver's clock minus the host's, and the time that a message takes.
        self._delays: dict[str, float] = {}
        self._driver_ahead: float | None = None  # from a file

    def begin(self, hosts: Sequence[str]) -> None:
        """A new attempt: its collectives are counted from 1 again."""
        self.hosts = hosts
        self._pending.clear()
        self._offsets.clear()
        self._delays = {host: self._delays[host] for host in hosts if host in self._delays}

    def restore(
        self, compared: int, offsets: Mapping[int, float], driver_ahead: float | None
    ) -> None:
        """Restore what a file says."""
        self.compared = compared
        self._offsets = {rank: deque([offset]) for rank, offset in offsets.items()}
        self._driver_ahead = driver_ahead

    def add(self, profile: Profile, now: float) -> None:
        """Add what a rank tells of its collectives; ``now`` is the driver's clock."""
        rank, host = profile.rank, self._host(profile.rank)
        self._delays[host] = min(self._delays.get(host, math.inf), now - profile.time)
        for number, waited, age in profile.arrivals:
            arrived = self._pending.setdefault(number, {})
            arrived[rank] = waited, profile.time - age * 1e-6
            if len(arrived) == len(self.hosts):
                del self._pending[number]
                self._compare(arrived)
            elif len(self._pending) > _MAX_PENDING:
                self._pending.popitem(last=False)

    def _compare(self, arrived: dict[int, tuple[int, float]]) -> None:
        """Find the rank that began a collective last, and for how long the others waited for it."""
        if len(arrived) < 2:
            return
        if any(waited == UNKNOWN for waited, _ in arrived.values()):
            begun = {rank: time + self._delay(rank) for rank, (_, time) in arrived.items()}
        else:
            begun = {rank: -waited * 1e-6 for rank, (waited, _) in arrived.items()}
            for rank, (_, time) in arrived.items():
                offsets = self._offsets.setdefault(rank, deque(maxlen=_CLOCK_SAMPLES))
                offsets.append(time - arrived[0][1])
        last = max(begun, key=lambda rank: begun[rank])
        total = self._totals[last]
        total.last += 1
        total.lateness += begun[last] - median(t for r, t in begun.items() if r != last)
        for rank, time in begun.items():
            self._totals[rank].waited_in_compared += begun[last] - time
        self.compared += 1

    def clock_offsets(self) -> dict[int, float]:
        """See :attr:`RunProfile.clock_offsets`."""
        if self._offsets:
            return {rank: median(offsets) for rank, offsets in sorted(self._offsets.items())}
        if not self._delays:
            return {}
        return {rank: self._delay(0) - self._delay(rank) for rank in range(len(self.hosts))}

    def driver_ahead(self) -> float | None:
        """See :attr:`RunProfile.driver_ahead`."""
        if not self._delays:
            return self._driver_ahead
        hosts = {self._host(rank): offset for rank, offset in self.clock_offsets().items()}
        found = [delay + hosts[host] for host, delay in self._delays.items() if host in hosts]
        return min(found, default=None)

    def _host(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else ""

    def _delay(self, rank: int) -> float:
        return self._delays.get(self._host(rank), 0.0)
