"""Draws shares by rank and time as colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from horovod_runner.results.page import scales
from horovod_runner.results.page.charts import Axis, Mark, box, plot
from horovod_runner.results.page.markup import Html, element, join

_TITLES: Final = 1500  # of all cells
_LABEL_PIXELS: Final = 15
_LEVELS: Final = 10  # colours in style.css


class Row(NamedTuple):
    """A row of a heat map: its label, and a share for each column; None where it is not known."""

    label: str
    shares: Sequence[float | None]


def heat_map(rows: Sequence[Row], axis: Axis, what: str, *, marks: Sequence[Mark] = ()) -> Html:
    """Draw shares by row and time, 0 as the darkest colour.

    Args:
        rows: from top to bottom, each with the same number of columns.
        axis: the horizontal axis, of time.
        what: what the shares are of, after a percentage.
        marks: vertical lines.
    """
    columns = len(rows[0].shares)
    top = _top(share for row in rows for share in row.shares if share is not None)
    paths: list[list[str]] = [[] for _ in range(_LEVELS)]
    for y, row in enumerate(rows):
        for x, share in enumerate(row.shares):
            if share is not None:
                level = min(_LEVELS - 1, int(share / top * _LEVELS))
                paths[level].append(f"M{x} {y}h1v1h-1z")
    drawn = [
        *(
            element("path", d="".join(path), class_=f"heat h{level}")
            for level, path in enumerate(paths)
            if path
        ),
        *(
            element(
                "path",
                element("title", mark.label),
                d=f"M{axis.place(mark.value) * columns:.2f} 0v{len(rows)}",
                class_="mark",
            )
            for mark in marks
        ),
        *_heat_titles(rows, axis, what),
    ]
    height = max(5, min(28, 420 // len(rows)))
    stride = -(-_LABEL_PIXELS // height)
    labels = [
        ((number + 0.5) / len(rows), row.label)
        for number, row in enumerate(rows)
        if number % stride == 0
    ]
    picture = plot(
        drawn,
        [(axis.place(tick.value), tick.label) for tick in axis.ticks(axis.low, axis.high)],
        labels,
        label=axis.label,
        description=f"share {what} by rank and time",
        size=(columns, len(rows)),
        height=height * len(rows),
        margin=max(len(label) for _, label in labels) + 1,
    )
    return join([picture, _heat_key(top, what)])


def _top(shares: Iterable[float]) -> float:
    """A round share that is not below any of these."""
    most = max(shares, default=0.0)
    return next(
        top for top in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0) if most <= top or top == 1
    )


def _heat_titles(rows: Sequence[Row], axis: Axis, what: str) -> Iterator[Html]:
    columns = len(rows[0].shares)
    parts = max(1, min(columns, _TITLES // len(rows)))
    for y, row in enumerate(rows):
        for part in range(parts):
            left, right = part * columns // parts, (part + 1) * columns // parts
            known = [share for share in row.shares[left:right] if share is not None]
            if known:
                at = axis.low + (axis.high - axis.low) * (left + right) / 2 / columns
                share = scales.percent(sum(known) / len(known))
                title = element("title", f"{row.label}, {axis.say(at)}\n{share} {what}")
                yield element("path", title, d=box(left, y, right - left, 1), class_="strip")


def _heat_key(top: float, what: str) -> Html:
    cells = [element("i", class_=f"swatch h{level}") for level in range(_LEVELS)]
    return element(
        "p", "0%", element("span", *cells, class_="ramp"), f"{top:.0%} {what}", class_="key"
    )
