"""Counters of a trace: what ranks have measured of themselves, and tasks of their hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.results.slowness.totals import spent_of
from horovod_runner.results.trace.clocks import Clocks
from horovod_runner.results.trace.events import Event, counter, pid_of_host, pid_of_rank, process
from horovod_runner.wire.measurements import steps_of

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.wire.measurements import Machine, Profile

    Row = Profile | Machine

_MEGA, _GIGA = 1e-6, 1e-9


def of_ranks(run: Run, clocks: Clocks) -> Iterator[Event]:
    """Counters of each rank: its steps, where their time goes, CPU, collectives and memory."""
    for rank, rows in run.profile.rows.items():
        yield from _counters(pid_of_rank(rank), rows, clocks, _OF_RANKS)
    for rank, machines in run.profile.machines.items():
        yield from _counters(pid_of_rank(rank), machines, clocks, _OF_WORKERS)


def of_hosts(run: Run, clocks: Clocks) -> Iterator[Event]:
    """Counters of each host, as the task beside its lowest rank has measured them."""
    hosts = {rank.rank: rank.host for rank in run.ranks}
    seen: set[str] = set()
    for rank, machines in run.profile.machines.items():
        host = hosts.get(rank, "")
        if host not in seen:
            seen.add(host)
            pid = pid_of_host(len(seen))
            yield from process(pid, f"host {host}".strip())
            yield from _counters(pid, machines, clocks, _OF_HOSTS)


def _counters(
    pid: int, rows: Sequence[Row], clocks: Clocks, counters: Mapping[str, _Values]
) -> Iterator[Event]:
    """Counters by their names, each made of the same rows."""
    found = [row for row in rows if row.seconds > 0]
    for name, values in counters.items():
        placed = (
            (
                clocks.by_rank(row.rank, row.time - row.seconds),
                clocks.by_rank(row.rank, row.time),
                values(row),
            )
            for row in found
        )
        yield from counter(pid, name, placed)


def _milliseconds(row: Profile) -> dict[str, float]:
    """Where each second went, in milliseconds."""
    spent = {"compute": max(0.0, row.seconds - sum(row.spent.values())), **spent_of(row)}
    return {name: seconds * 1e3 / row.seconds for name, seconds in spent.items()}


def _per_second(amount: float, row: Row) -> dict[str, float]:
    return {"MB per second": amount * _MEGA / row.seconds}


#: The values of a row, by the names of their series.
_Values = Callable[[Any], dict[str, float]]
_OF_RANKS: Final[dict[str, _Values]] = {
    "steps": lambda row: {"per second": steps_of(row.steps) / row.seconds},
    "ms per second": _milliseconds,
    "CPU": lambda row: {"cores": row.cpu / row.seconds},
    "collectives": lambda row: _per_second(row.bytes, row),
}
_OF_WORKERS: Final[dict[str, _Values]] = {
    "memory": lambda row: {"GB": row.memory * _GIGA},
    "page faults": lambda row: {"per second": row.faults / row.seconds},
}
_OF_HOSTS: Final[dict[str, _Values]] = {
    "cores": lambda row: {"busy": row.cores, "for a rank": row.of_cores},
    "free memory": lambda row: {"GB": row.free_memory * _GIGA},
    "CPU quota": lambda row: {"% throttled": 100 * row.throttled / row.seconds},
    "disk": lambda row: _per_second(row.disk, row),
    "network": lambda row: _per_second(row.network, row),
    "swap": lambda row: _per_second(row.swapped, row),
}
