"""Keeps what was measured of the machine under each rank, and completes it from its host's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from horovod_runner.wire.measurements import OF_HOST, Machine

# An older measurement of another rank of the host does not count.
_SAME_SECONDS: Final = 15.0


class Machines:
    """The measurements of a run, by rank; not for several threads at once."""

    def __init__(self) -> None:
        self._by_rank: dict[int, deque[Machine]] = {}
        self._without_host: dict[int, set[int]] = {}  # ranks whose host is not measured yet

    @classmethod
    def restored(cls, measured: Iterable[Machine]) -> Machines:
        """What :meth:`all` has returned."""
        machines = cls()
        for machine in measured:
            machines._by_rank.setdefault(machine.rank, deque()).append(machine)
        return machines

    def begin(self) -> None:
        """Begin a new attempt: its ranks may have other hosts."""
        self._without_host.clear()

    def add(self, machine: Machine, most: int) -> None:
        """Add a measurement; the oldest of a rank is dropped where there are more than ``most``."""
        measured = self._by_rank.setdefault(machine.rank, deque())
        if machine.host_rank in (-1, machine.rank):
            machine = msgspec.structs.replace(machine, other_cores=self._other_cores(machine))
            for rank in self._without_host.pop(machine.rank, ()):
                self._by_rank[rank][-1] = _with_host(self._by_rank[rank][-1], machine)
        elif host := self._host(machine):
            machine = _with_host(machine, host)
        else:
            self._without_host.setdefault(machine.host_rank, set()).add(machine.rank)
        measured.append(machine)
        if len(measured) > most:
            measured.popleft()

    def _host(self, machine: Machine) -> Machine | None:
        """The last measurement of a rank's host."""
        hosts = self._by_rank.get(machine.host_rank)
        return hosts[-1] if hosts and machine.time - hosts[-1].time < _SAME_SECONDS else None

    def _other_cores(self, host: Machine) -> float:
        """Cores that are busy on a host, but not with the ranks of this run."""
        own, rank = host.own_cores, host.rank + 1
        # The ranks of a host have neighbouring numbers.
        while (measured := self._by_rank.get(rank)) and measured[-1].host_rank == host.rank:
            if host.time - measured[-1].time < _SAME_SECONDS:
                own += measured[-1].own_cores
            rank += 1
        return max(0.0, host.cores - own)

    def latest(self) -> dict[int, Machine]:
        """The last measurement of each rank, by rank."""
        return {rank: measured[-1] for rank, measured in self._by_rank.items()}

    def all(self) -> list[Machine]:
        """All measurements, in the order of ranks and times."""
        return [machine for measured in self.by_rank().values() for machine in measured]

    def by_rank(self) -> dict[int, list[Machine]]:
        """The measurements of each rank, by rank; the oldest first."""
        return {rank: list(measured) for rank, measured in sorted(self._by_rank.items())}


def _with_host(machine: Machine, host: Machine) -> Machine:
    """A measurement beside a rank, with what is known of its host."""
    found = {name: getattr(host, name) for name in OF_HOST}
    return msgspec.structs.replace(machine, **found)
