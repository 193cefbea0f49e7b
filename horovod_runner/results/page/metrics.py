"""The section of metrics: a panel for each, by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from horovod_runner.results.page.charts import (
    MAX_LINES,
    Axis,
    Line,
    Mark,
    Points,
    line_chart,
    step_axis,
)
from horovod_runner.results.page.markup import Html, Section, element, section
from horovod_runner.results.page.view import View

_PANELS: Final = 24
_POINTS: Final = 400  # of a line
_BINS: Final = 120  # of a chart that sums up many ranks

# (attempt, step or None, value) in the order of arrival; see Metrics.series
_Reports = Sequence[tuple[int, int | None, float]]


def metrics(view: View) -> Section | None:
    """All metrics, or the first ones where there are many."""
    by_name: dict[str, dict[int, _Reports]] = {}
    for rank in sorted(view.run._metrics.latest):
        for name, reports in view.run._metrics.series(rank).items():
            by_name.setdefault(name, {})[rank] = reports
    if not by_name:
        return None
    shown = list(by_name)[:_PANELS]
    rest = list(by_name)[_PANELS:]
    note = None
    if rest:
        names = ", ".join(rest[:50]) + (", …" if len(rest) > 50 else "")
        note = element(
            "p", f"Without a chart: {len(rest):,} more metrics ({names}).", class_="note"
        )
    resumed = {each.number: each.resumed_from for each in view.run.attempts}
    dropped = sum(view.run.dropped_reports.values())
    left_out = f"{dropped:,} reports were too many to keep." if dropped else ""
    return section(
        "metrics",
        "Metrics by step",
        view.lead(""),
        element("div", *(_panel(n, by_name[n], resumed) for n in shown), class_="panels"),
        note,
        element("p", left_out, class_="note") if left_out else None,
    )


def _panel(name: str, by_rank: dict[int, _Reports], resumed: dict[int, int | None]) -> Html:
    points = {rank: _points(reports) for rank, reports in by_rank.items()}
    xs = [x for some in points.values() for x, _, _ in some]
    has_steps = any(step is not None for reports in by_rank.values() for _, step, _ in reports)
    axis = step_axis(min(xs), max(xs), "step" if has_steps else "report")
    strange = sum(value is None for some in points.values() for _, _, value in some)
    note = f"{strange:,} values are not finite numbers (NaN, infinite)." if strange else ""
    marks = _restarts(points, resumed)
    if len(points) <= MAX_LINES:
        lines = [
            Line(f"rank {rank}", _thinned(some), f"c{number}")
            for number, (rank, some) in enumerate(points.items())
        ]
        return line_chart(name, lines, axis, marks=marks, note=note)
    low, middle, high = _summed_up(list(points.values()), axis)
    line = Line(f"median of {len(points):,} ranks", middle)
    return line_chart(name, [line], axis, marks=marks, band=(low, high), note=note)


#: (step, attempt, value); None for a value that is no finite number
_Point = tuple[float, int, float | None]


def _points(reports: _Reports) -> list[_Point]:
    return [
        (float(index if step is None else step), attempt, value if math.isfinite(value) else None)
        for index, (attempt, step, value) in enumerate(reports)
    ]


def _restarts(points: dict[int, list[_Point]], resumed: dict[int, int | None]) -> list[Mark]:
    """Where the launches after the first one began."""
    first: dict[int, float] = {}
    for some in points.values():
        for x, attempt, _ in some:
            first.setdefault(attempt, x)
    return [
        Mark(float(x if (step := resumed.get(attempt)) is None else step), f"attempt {attempt}")
        for attempt, x in sorted(first.items())
        if attempt > 1
    ]


def _thinned(points: list[_Point]) -> Points:
    """At most some hundred points: of neighbours the lowest and the highest, so peaks stay.

    The line is interrupted between attempts, and where a value is no finite number.
    """
    stride = max(1, -(-len(points) * 2 // _POINTS))
    thin: list[tuple[float, float | None]] = []
    last_attempt: int | None = None
    for start in range(0, len(points), stride):
        some = points[start : start + stride]
        if len(some) > 2:
            known = [point for point in some if point[2] is not None]
            ends = {_lowest(known), _highest(known)} if known else set()
            some = [point for point in known if point in ends][:2] or some[:1]
        for x, attempt, value in some:
            if last_attempt not in (None, attempt):
                thin.append((x, None))
            last_attempt = attempt
            thin.append((x, value))
    return thin


def _lowest(points: list[_Point]) -> _Point:
    return min(points, key=lambda point: point[2] or 0.0)


def _highest(points: list[_Point]) -> _Point:
    return max(points, key=lambda point: point[2] or 0.0)


def _summed_up(ranks: list[list[_Point]], axis: Axis) -> tuple[Points, Points, Points]:
    """The lowest, median and highest value of all ranks by step."""
    bins: dict[int, list[float]] = {}
    for points in ranks:
        own: dict[int, tuple[float, int]] = {}
        for x, _, value in points:
            if value is not None:
                number = min(_BINS - 1, int(axis.place(x) * _BINS))
                total, count = own.get(number, (0.0, 0))
                own[number] = total + value, count + 1
        for number, (total, count) in own.items():
            bins.setdefault(number, []).append(total / count)
    width = (axis.high - axis.low) / _BINS
    found = [(axis.low + (number + 0.5) * width, values) for number, values in sorted(bins.items())]
    return (
        [(x, min(values)) for x, values in found],
        [(x, median(values)) for x, values in found],
        [(x, max(values)) for x, values in found],
    )
