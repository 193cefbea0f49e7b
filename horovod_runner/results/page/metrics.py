"""The section of metrics: a chart for each, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from horovod_runner.results.page.charts import MAX_LINES, Chart, Curve, Numbers, line_chart
from horovod_runner.results.page.numbers import number
from horovod_runner.results.page.view import COLOURS, View

_CHARTS: Final = 24
_NAMED: Final = 50
_POINTS: Final = 200  # of a line
_BINS: Final = 120  # of a chart that sums up many ranks

# A row for each report: its step, its attempt and its value.
_Reports = NDArray[np.float64]


def metrics(view: View) -> dict[str, Any] | None:
    """Charts of all metrics, or of the first ones where there are many, and notes."""
    by_name: dict[str, dict[int, _Reports]] = {}
    counted = set()  # metrics that were reported without a step
    for rank in sorted(view.run._metrics.ranks):
        for name, reports in view.run._metrics.series(rank).items():
            if not reports:  # its only values were thinned away
                continue
            rows = [
                (n if step is None else step, attempt, value)
                for n, (attempt, step, value) in enumerate(reports)
            ]
            by_name.setdefault(name, {})[rank] = np.array(rows, float)
            if all(step is None for _, step, _ in reports):
                counted.add(name)
    if not by_name:
        return None
    resumed = {each.number: each.resumed_from for each in view.run.attempts}
    charts, once = [], []
    for name, by_rank in list(by_name.items())[:_CHARTS]:
        x_label = "report" if name in counted else "step"
        chart = _chart(name, by_rank, x_label, resumed)
        if chart is not None:
            charts.append(chart)
        else:
            step, _, value = next(iter(by_rank.values()))[-1]
            once.append(f"{name} {number(value)} ({x_label} {step:,.0f})")
    rest, dropped = list(by_name)[_CHARTS:], sum(view.run.dropped_reports.values())
    names = ", ".join(rest[:_NAMED]) + (", …" if len(rest) > _NAMED else "")
    notes = {
        f"Less than two values to draw: {'; '.join(once)}.": once,
        f"Without a chart: {len(rest):,} more metrics ({names}).": rest,
        f"{dropped:,} reports were too many to keep.": dropped,
    }
    return {"charts": charts, "notes": [note for note, there in notes.items() if there]}


def _chart(
    name: str, by_rank: Mapping[int, _Reports], x_label: str, resumed: Mapping[int, int | None]
) -> Chart | None:
    every = np.concatenate(list(by_rank.values()))
    strange = int((~np.isfinite(every[:, 2])).sum())
    first: dict[int, float] = {}
    for step, attempt, _ in every.tolist():
        first.setdefault(int(attempt), step)
    marks = {
        attempt: step if resumed.get(attempt) is None else float(resumed[attempt] or 0)
        for attempt, step in sorted(first.items())
        if attempt > 1
    }
    band = None
    if len(by_rank) <= MAX_LINES:
        pairs = zip(by_rank.items(), COLOURS, strict=False)
        lines = [Curve(f"rank {rank}", *_thinned(rows), colour) for (rank, rows), colour in pairs]
    else:
        steps, low, middle, high = _summed_up(list(by_rank.values()), every[:, 0])
        lines, band = [Curve(f"median of {len(by_rank):,} ranks", steps, middle)], (low, high)
    note = f"{strange:,} values are not finite numbers (NaN, infinite)." if strange else ""
    return line_chart(name, lines, x_label, marks=marks, band=band, note=note)


def _thinned(reports: _Reports) -> tuple[Numbers, Numbers]:
    """Some hundred points: of neighbours the lowest and the highest, so peaks stay.

    The line is interrupted between attempts, and where values are not finite numbers.
    """
    size = max(1, -(-len(reports) * 2 // _POINTS))
    pieces = []
    for attempt in dict.fromkeys(reports[:, 1]):
        own = reports[reports[:, 1] == attempt]
        parts = np.full((-(-len(own) // size), size), np.nan)
        parts.flat[: len(own)] = own[:, 2]
        known, begins = np.isfinite(parts), np.arange(len(parts)) * size
        lowest = begins + np.where(known, parts, np.inf).argmin(1)
        highest = begins + np.where(known, parts, -np.inf).argmax(1)
        pieces += [own[np.unique([lowest, highest])], np.full((1, 3), np.nan)]
    steps, _, values = np.concatenate(pieces[:-1]).T
    return steps, values


def _summed_up(ranks: Sequence[_Reports], steps: Numbers) -> tuple[Numbers, ...]:
    """Steps, and the lowest, median and highest value of all ranks there."""
    low, width = steps.min(), np.ptp(steps) / _BINS or 1.0
    means = np.full((len(ranks), _BINS), np.nan)
    for mean, reports in zip(means, ranks, strict=True):
        known = reports[np.isfinite(reports[:, 2])]
        place = np.minimum((known[:, 0] - low) / width, _BINS - 1).astype(int)
        count = np.bincount(place, minlength=_BINS)
        np.divide(np.bincount(place, known[:, 2], _BINS), count, out=mean, where=count > 0)
    some = np.isfinite(means).any(0)
    means, middles = means[:, some], low + (np.flatnonzero(some) + 0.5) * width
    return middles, np.fmin.reduce(means), np.nanmedian(means, 0), np.fmax.reduce(means)
