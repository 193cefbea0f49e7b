"""The charts by time: steps, who waits for whom, and what the hosts' machines did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_runner.common.text import spans
from horovod_runner.results.page.charts import (
    MAX_LINES,
    Chart,
    Curve,
    Numbers,
    heat_map,
    line_chart,
)
from horovod_runner.results.page.numbers import number, scale, time_unit
from horovod_runner.results.page.view import COLOURS, KINDS, View
from horovod_runner.wire.measurements import Machine, Profile, steps_of

_MOST_ROWS: Final = 64  # of the heat map
_MOST: Final = 120  # intervals
# An interval of which less is known stays empty.
_LEAST_KNOWN: Final = 0.1
Row = TypeVar("Row", bound=Profile | Machine)


@dataclass(frozen=True)
class Timeline:
    """Equal intervals from the beginning of a run to its end.

    Attributes:
        start: seconds since the epoch.
        width: seconds of an interval.
    """

    start: float
    width: float
    count: int

    def sums(
        self, rows: Sequence[Row], values: Callable[[Row], Sequence[float]], offset: float = 0.0
    ) -> NDArray[np.float64]:
        """Add up amounts in each interval; ``offset`` is by how much the rank's clock is ahead.

        Returns:
            A row for each interval: the seconds that are known, and the sum of each amount; NaN
            where next to nothing is known.
        """
        amounts = np.array([(row.seconds, *values(row)) for row in rows], float)
        ends = np.array([[row.time - offset - self.start] for row in rows])
        seconds = np.maximum(amounts[:, :1], 1e-9)
        edges = np.arange(self.count + 1) * self.width
        common = np.minimum(ends, edges[1:]) - np.maximum(ends - seconds, edges[:-1])
        found = (np.maximum(common, 0.0) / seconds).T @ amounts
        found[found[:, 0] < _LEAST_KNOWN * self.width] = np.nan
        return np.asarray(found)


def _timeline_of(view: View, every: Iterable[Sequence[Row]]) -> Timeline | None:
    """At most 120 intervals, none shorter than a typical measurement; None without measurements."""
    rows = [row for some in every for row in some]
    if not rows:
        return None
    start = min(view.run.timings.queued, *(row.time - row.seconds for row in rows))
    last = max(row.time for row in rows)
    seconds = max(last, min(view.end, last + 60.0)) - start
    typical = median(row.seconds for row in rows)
    count = max(1, min(_MOST, int(seconds / max(typical, 1e-3))))
    return Timeline(start, seconds / count, count)


@dataclass(frozen=True)
class _Quantity:
    """A number that is measured of machines.

    Attributes:
        unit: of its values; values in bytes get a prefix.
        amount: what a measurement adds to its interval: the number times seconds, or a count.
        of_rank: whether each rank has its own, so that the ranks of a host are added up.
        always: whether the chart is shown where all values are 0.
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


class _Axis:
    """The horizontal axis of charts by time."""

    def __init__(self, view: View, timeline: Timeline) -> None:
        factor, unit = time_unit(timeline.count * timeline.width)
        self.label = f"time since the run began ({unit})"
        self.middles = (
            np.linspace(0.5, timeline.count - 0.5, timeline.count) * timeline.width / factor
        )
        self.ends = (0.0, timeline.count * timeline.width / factor)
        self.marks = {
            each.number: (each.started - timeline.start) / factor for each in view.run.attempts[1:]
        }

    def chart(
        self,
        title: str,
        unit: str,
        lines: Mapping[str, Numbers],
        colours: Sequence[str] = COLOURS,
        band: tuple[Numbers, Numbers] | None = None,
    ) -> Chart | None:
        """Draw lines that have a value for each interval; as :func:`line_chart`."""
        pairs = zip(lines.items(), colours, strict=False)
        drawn = [Curve(name, self.middles, ys, colour) for (name, ys), colour in pairs]
        more: dict[str, Any] = {"ends": self.ends, "marks": self.marks, "band": band}
        return line_chart(title, drawn, self.label, unit=unit, from_zero=True, **more)


def timeline_of_profile(view: View) -> Timeline | None:
    """The intervals of what the ranks measured; None where no rank has measured twice."""
    if all(len(rows) < 2 for rows in view.rows.values()):
        return None
    return _timeline_of(view, view.rows.values())


def stragglers(view: View, timeline: Timeline) -> dict[str, Any] | None:
    """A heat map: which rank waits for others, and when."""
    waits = any(view.spent(rank, total.spent)["waiting"] for rank, total in view.totals.items())
    ranks = sorted(view.rows)
    if len(ranks) < 2 or not waits:
        return None
    group = -(-len(ranks) // _MOST_ROWS)
    rows, labels = {}, []
    for first in range(0, len(ranks), group):
        some = ranks[first : first + group]
        labels.append(spans(some))
        name = view.name(some[0]) if group == 1 else f"ranks {labels[-1]}"
        rows[name] = np.fmin.reduce([_waiting(view, timeline, rank) for rank in some])
    axis = _Axis(view, timeline)
    return {"chart": heat_map(rows, labels, axis.label, axis.ends, axis.marks), "group": group}


def _waiting(view: View, timeline: Timeline, rank: int) -> Numbers:
    def waiting(row: Profile) -> tuple[float]:
        return (view.spent(rank, row.spent)["waiting"],)

    seconds, waited = timeline.sums(view.rows[rank], waiting, view.offsets.get(rank, 0.0)).T
    return np.asarray(np.minimum(1.0, waited / seconds))


def over_time(view: View, timeline: Timeline) -> list[Chart]:
    """Steps per second, the share of each kind of time, and the bytes that are reduced."""

    def amounts(row: Profile) -> tuple[float, ...]:
        spent = view.spent(row.rank, row.spent).values()
        return (steps_of(row.steps), row.bytes, max(0.0, row.seconds - sum(spent)), *spent)

    sums: NDArray[np.float64] = np.zeros((timeline.count, 3 + len(KINDS)))
    for rank, rows in view.rows.items():
        sums += np.nan_to_num(timeline.sums(rows, amounts, view.offsets.get(rank, 0.0)))
    sums[sums[:, 0] == 0] = np.nan
    steps, reduced, *spent = (sums[:, 1:] / sums[:, :1]).T
    # A wait is counted where it ends, so that it can exceed its interval.
    shown = [
        (words, colour, np.minimum(100.0, 100 * share))
        for (_, words, colour), share in zip(KINDS, spent, strict=True)
        if (share > 0.001).any()
    ]
    kinds = {words: share for words, _, share in shown}
    axis = _Axis(view, timeline)
    factor, prefix = scale(reduced[np.isfinite(reduced)])
    charts = [
        axis.chart("Steps", "per second", {"": steps}),
        axis.chart("Time of the ranks", "%", kinds, [colour for _, colour, _ in shown]),
    ]
    if (reduced > 0).any():
        unit = f"{prefix}B per second and rank"
        charts.append(axis.chart("Reduced", unit, {"": reduced / factor}))
    return [chart for chart in charts if chart is not None]


def hosts(view: View) -> dict[str, Any]:
    """Charts of the hosts' machines; of what has no two points, the mean by title and host."""
    # A worker that has ended has no memory, and its host is idle.
    measured = view.run.profile.machines.items()
    machines = {
        rank: known for rank, rows in measured if (known := [row for row in rows if row.memory])
    }
    timeline = _timeline_of(view, machines.values())
    found: dict[str, Any] = {"charts": [], "means": {}, "cores": []}
    by_host = {
        host: {rank: machines[rank] for rank in ranks if rank in machines}
        for host, ranks in view.by_host.items()
    }
    if timeline is None or not any(by_host.values()):
        return found
    of_host = {host: _of_host(view, timeline, some) for host, some in by_host.items() if some}
    axis = _Axis(view, timeline)
    once = all(len(rows) < 2 for rows in machines.values())
    for index, quantity in enumerate(_QUANTITIES):
        values = {host: columns[:, index] for host, columns in of_host.items()}
        every = np.concatenate(list(values.values()))
        if not (quantity.always and np.isfinite(every).any()) and not (every > 0).any():
            continue
        factor, unit = 1.0, quantity.unit
        if unit.startswith("B"):
            factor, prefix = scale(every[np.isfinite(every)])
            unit = prefix + unit
        values = {host: ys / factor for host, ys in values.items()}
        chart = None if once else _of_hosts(axis, quantity.title, unit, values)
        if chart is not None:
            found["charts"].append(chart)
            continue
        found["means"][quantity.title] = {
            host: f"{number(float(np.nanmean(ys)))} {unit}".strip()
            for host, ys in values.items()
            if np.isfinite(ys).any()
        }
    found["cores"] = sorted({m.of_cores for rows in machines.values() for m in rows if m.of_cores})
    return found


def _of_host(view: View, timeline: Timeline, machines: Mapping[int, list[Machine]]) -> Numbers:
    """For each interval of a host its quantities, of what its ranks have measured."""

    def amounts(row: Machine) -> tuple[float, ...]:
        return tuple(quantity.amount(row) for quantity in _QUANTITIES)

    sums = np.array(
        [
            timeline.sums(rows, amounts, view.offsets.get(rank, 0.0))
            for rank, rows in machines.items()
        ]
    )
    rates = sums[:, :, 1:] / sums[:, :, :1]
    count = np.isfinite(rates).sum(0)
    mean = np.nansum(rates, 0) / np.where(count, count, np.nan)
    # Not all ranks end at the same moment, so the mean of some stands for all.
    return np.asarray(mean * [len(machines) if each.of_rank else 1 for each in _QUANTITIES])


def _of_hosts(axis: _Axis, title: str, unit: str, values: Mapping[str, Numbers]) -> Chart | None:
    if len(values) <= MAX_LINES:
        return axis.chart(title, unit, values)
    table = np.array(list(values.values()))
    known = np.isfinite(table).any(0)
    low, middle, high = np.full((3, table.shape[1]), np.nan)
    low[known], high[known] = np.fmin.reduce(table[:, known]), np.fmax.reduce(table[:, known])
    middle[known] = np.nanmedian(table[:, known], 0)
    return axis.chart(title, unit, {f"median of {len(values):,} hosts": middle}, band=(low, high))
