"""The section of hosts: where the ranks ran, and what their machines did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from horovod_runner.common.text import spans
from horovod_runner.results.page import scales
from horovod_runner.results.page.charts import MAX_LINES, Line, line_chart, time_axis
from horovod_runner.results.page.markup import Html, Section, element, join, section, table
from horovod_runner.results.page.timeline import Timeline, timeline_of
from horovod_runner.results.page.view import View
from horovod_runner.wire.measurements import Machine

_MOST_HOSTS: Final = 200  # of the table


@dataclass(frozen=True)
class _Quantity:
    """A number that is measured of machines.

    Attributes:
        title: of its panel.
        unit: of its values; values in bytes get a prefix.
        amount: what a measurement adds to its interval: the number times seconds, or a count.
        of_rank: whether each rank has its own, so that the ranks of a host are added up.
        always: whether the panel is shown where all values are 0.
    """

    title: str
    unit: str
    amount: Callable[[Machine], float]
    of_rank: bool = False
    always: bool = True


_QUANTITIES: Final = (
    _Quantity("Busy cores", "", lambda m: m.cores * m.seconds),
    _Quantity("Memory of the ranks", "B", lambda m: m.memory * m.seconds, of_rank=True),
    _Quantity("Free memory", "B", lambda m: m.free_memory * m.seconds),
    _Quantity("Disk", "B/s", lambda m: m.disk),
    _Quantity("Network", "B/s", lambda m: m.network),
    _Quantity("Stopped by the CPU quota", "% of time", lambda m: 100 * m.throttled, always=False),
    _Quantity("Swap", "B/s", lambda m: m.swapped, always=False),
    _Quantity("Page faults", "per second", lambda m: m.faults, of_rank=True, always=False),
)


def hosts(view: View) -> Section | None:
    """The ranks of each host, and its machine over time."""
    by_host: dict[str, list[int]] = {}
    for info in view.run.ranks:
        by_host.setdefault(info.host, []).append(info.rank)
    if not by_host:
        return None
    gpus = {info.rank: info.gpus for info in view.run.ranks}
    rows = []
    for host, ranks in list(by_host.items())[:_MOST_HOSTS]:
        own = sorted({gpu for rank in ranks for gpu in gpus[rank]})
        rows.append([host, spans(ranks), f"{len(ranks):,}", ", ".join(own) or "none"])
    more = len(by_host) - len(rows)
    return section(
        "hosts",
        "Hosts",
        _charts(view, by_host),
        table(["host", "ranks", "count", "GPUs"], rows, "--r-"),
        element("p", f"… and {more:,} more hosts.", class_="note") if more else None,
    )


def _charts(view: View, by_host: dict[str, list[int]]) -> Html | None:
    # A worker that has ended has no memory, and its host is idle.
    machines = {
        rank: [row for row in rows if row.memory]
        for rank, rows in view.run.profile.machines.items()
    }
    timeline = timeline_of(view.run, [row for rows in machines.values() for row in rows], view.end)
    if timeline is None:
        return None

    def amounts(row: Machine) -> tuple[float, ...]:
        return tuple(quantity.amount(row) for quantity in _QUANTITIES)

    sums = {
        rank: timeline.sums(rows, amounts, view.offsets.get(rank, 0.0))
        for rank, rows in machines.items()
    }
    measured = {
        host: [sums[rank] for rank in ranks if rank in sums] for host, ranks in by_host.items()
    }
    measured = {host: ranks for host, ranks in measured.items() if ranks}
    charts = []
    for number, quantity in enumerate(_QUANTITIES):
        values = {
            host: [_value(quantity, number + 1, cells) for cells in zip(*ranks, strict=True)]
            for host, ranks in measured.items()
        }
        known = [value for some in values.values() for value in some if value is not None]
        if known and (quantity.always or any(known)):
            charts.append(_chart(view, quantity, values, timeline))
    cores = {row.of_cores for rows in machines.values() for row in rows if row.of_cores}
    lead = ""
    if cores:
        few, many = min(cores), max(cores)
        which = f"{few}" if few == many else f"{few} to {many}"
        lead = f"The processes of a rank may use {which} cores."
    return join([view.lead(lead), element("div", *charts, class_="panels")])


def _value(
    quantity: _Quantity, index: int, cells: Sequence[tuple[float, ...] | None]
) -> float | None:
    """The value of a host in an interval, of what its ranks have measured."""
    known = [cell[index] / cell[0] for cell in cells if cell is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean * len(cells) if quantity.of_rank else mean  # not all ranks end at the same moment


def _chart(
    view: View, quantity: _Quantity, values: dict[str, list[float | None]], timeline: Timeline
) -> Html:
    factor, unit = 1.0, quantity.unit
    if unit.startswith("B"):
        known = [value for some in values.values() for value in some if value is not None]
        factor, prefix = scales.scale(known)
        unit = prefix + unit
    axis, marks = time_axis(timeline.seconds), view.restarts(timeline.start)

    def points(some: Sequence[float | None]) -> list[tuple[float, float | None]]:
        return [
            (timeline.middle(number), None if value is None else value / factor)
            for number, value in enumerate(some)
        ]

    if len(values) <= MAX_LINES:
        lines = [
            Line(host, points(some), f"c{number}")
            for number, (host, some) in enumerate(values.items())
        ]
        return line_chart(quantity.title, lines, axis, unit=unit, from_zero=True, marks=marks)
    columns = [
        [value for value in column if value is not None]
        for column in zip(*values.values(), strict=True)
    ]
    low, middle, high = (
        points([how(column) if column else None for column in columns])
        for how in (min, median, max)
    )
    line = Line(f"median of {len(values):,} hosts", middle)
    return line_chart(
        quantity.title, [line], axis, unit=unit, from_zero=True, marks=marks, band=(low, high)
    )
