"""Draws charts as SVG whose texts are HTML: they fit any width, and letters keep their size.

Colours are classes of style.css, which has them for light and dark pages. A ``<title>`` is what a
browser shows where the pointer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from horovod_runner.results.page import scales
from horovod_runner.results.page.markup import Html, element, join
from horovod_runner.results.page.scales import Tick

_WIDTH, _HEIGHT = 2000, 1000  # units of a drawing, which is stretched to its place
_STRIPS: Final = 60  # places of a line chart that tell their values
#: How many lines a chart has colours for.
MAX_LINES: Final = 6
_LABEL_SHARE: Final = 0.13  # of a bar; a narrower part has no room for a label

#: (x, y) with growing x; a line is interrupted where y is None.
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: for the legend.
        points: what is drawn.
        colour: a class of style.css.
    """

    name: str
    points: Points
    colour: str = "c0"


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart.

    Attributes:
        label: what it shows.
        low, high: its ends.
        ticks: returns the ticks between two values.
        say: formats a value.
    """

    label: str
    low: float
    high: float
    ticks: Callable[[float, float], list[Tick]]
    say: Callable[[float], str]

    def place(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


class Mark(NamedTuple):
    """A vertical line in a chart, and what it says."""

    value: float
    label: str


def time_axis(seconds: float) -> Axis:
    """The axis of a run's time."""
    label = f"time since the run began ({scales.time_unit(seconds)})"
    return Axis(label, 0.0, seconds, scales.time_ticks, scales.duration)


def step_axis(low: float, high: float, label: str = "step") -> Axis:
    """The axis of a training's steps."""

    def ticks(low: float, high: float) -> list[Tick]:
        return scales.number_ticks(low, high, 6, whole=True)

    return Axis(label, low, high, ticks, lambda value: f"{label} {value:,.0f}")


def line_chart(
    title: str,
    lines: Sequence[Line],
    axis: Axis,
    *,
    unit: str = "",
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
    band: tuple[Points, Points] | None = None,
    note: str = "",
) -> Html:
    """Draw lines in one panel.

    Args:
        title: of the panel.
        lines: at most :data:`MAX_LINES`.
        axis: the horizontal axis.
        unit: of the values, behind the title.
        from_zero: whether the vertical axis begins at 0.
        marks: vertical lines.
        band: the lower and the upper edge of an area behind the lines, over the same x.
        note: a sentence below the chart.
    """
    edges: Sequence[Points] = () if band is None else band
    values = [y for points in (*edges, *(line.points for line in lines)) for _, y in points]
    known = [y for y in values if y is not None]
    low, high = _range(known, from_zero=from_zero)

    def y(value: float) -> float:
        return 1 - (value - low) / (high - low)

    ticks = scales.number_ticks(low, high, 4)
    drawn = [
        *(_rule(y(tick.value), "grid") for tick in ticks),
        *(_rule(axis.place(mark.value), "mark", mark.label, upright=True) for mark in marks),
        None if band is None else _area(band, axis, y),
        *(
            element("path", d=_path(line.points, axis, y), class_=f"line {line.colour}")
            for line in lines
        ),
        *_strips(lines, axis, unit),
    ]
    legend = [(line.colour, line.name) for line in lines] if len(lines) > 1 or band else []
    if band is not None:
        legend.append(("band", "lowest to highest"))
    return figure(
        join([title, element("small", f" {unit}") if unit else None]),
        plot(
            drawn,
            [(axis.place(tick.value), tick.label) for tick in axis.ticks(axis.low, axis.high)],
            [(y(tick.value), tick.label) for tick in ticks],
            label=axis.label,
            description=f"{title} {unit} by {axis.label}",
            margin=max(4, *(len(tick.label) + 1 for tick in ticks)),
        ),
        key(legend),
        element("p", note, class_="note") if note else None,
    )


def figure(title: Html | str, *children: Html | None) -> Html:
    """A chart with its title."""
    return element("figure", element("figcaption", title), *children)


def key(entries: Iterable[tuple[str, str]]) -> Html | None:
    """The legend of a chart: colours and their names."""
    items = [
        element("li", element("i", class_=f"swatch {colour}"), name) for colour, name in entries
    ]
    return element("ul", *items, class_="key") if items else None


def plot(
    drawn: Iterable[Html | None],
    x_labels: Sequence[tuple[float, str]],
    y_labels: Sequence[tuple[float, str]],
    *,
    label: str,
    description: str,
    size: tuple[int, int] = (_WIDTH, _HEIGHT),
    height: int = 150,
    margin: int = 4,
) -> Html:
    """Put labels around a drawing.

    Args:
        drawn: the elements of the drawing.
        x_labels: places from 0 at the left to 1, and texts.
        y_labels: places from 0 at the top to 1, and texts.
        label: of the horizontal axis.
        description: for those who do not see it.
        size: the units of the drawing.
        height: in pixels.
        margin: the width of the vertical axis, in letters.
    """
    picture = element(
        "svg",
        *drawn,
        viewBox=f"0 0 {size[0]} {size[1]}",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )
    xs = [
        element("span", text, style=f"left:{place:.2%}", class_=_side(place))
        for place, text in x_labels
    ]
    ys = [element("span", text, style=f"top:{place:.2%}") for place, text in y_labels]
    return element(
        "div",
        element("div", *ys, class_="ys", aria_hidden="true"),
        picture,
        element("div", *xs, class_="xs", aria_hidden="true"),
        element("div", label, class_="axis"),
        class_="plot",
        style=f"--height:{height}px;--margin:{margin}ch",
    )


def _side(place: float) -> str | None:
    """Labels near an end do not reach beyond it."""
    return "first" if place < 0.04 else "last" if place > 0.96 else None


def _range(known: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """The ends of a vertical axis."""
    low, high = min(known, default=0.0), max(known, default=1.0)
    if from_zero:
        return min(0.0, low), high * 1.08 or 1.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _rule(place: float, kind: str, title: str = "", *, upright: bool = False) -> Html:
    """A line across the drawing."""
    path = f"M{place * _WIDTH:.0f} 0v{_HEIGHT}" if upright else f"M0 {place * _HEIGHT:.0f}h{_WIDTH}"
    return element("path", element("title", title) if title else None, d=path, class_=kind)


def _pieces(
    points: Points, axis: Axis, y: Callable[[float], float]
) -> Iterator[list[tuple[int, int]]]:
    """The uninterrupted pieces of a line, in units of the drawing."""
    piece: list[tuple[int, int]] = []
    for at, value in points:
        if value is None:
            if piece:
                yield piece
            piece = []
        else:
            piece.append((round(axis.place(at) * _WIDTH), round(y(value) * _HEIGHT)))
    if piece:
        yield piece


def _path(points: Points, axis: Axis, y: Callable[[float], float]) -> str:
    texts = []
    for piece in _pieces(points, axis, y):
        text = "L".join(f"{px} {py}" for px, py in piece)
        texts.append(f"M{text}" + ("h0" if len(piece) == 1 else ""))  # h0: a dot
    return "".join(texts)


def _area(band: tuple[Points, Points], axis: Axis, y: Callable[[float], float]) -> Html:
    low, high = band
    path = ""
    for below, above in zip(_pieces(low, axis, y), _pieces(high, axis, y), strict=True):
        path += f"M{'L'.join(f'{px} {py}' for px, py in (*below, *reversed(above)))}Z"
    return element("path", d=path, class_="band")


def _strips(lines: Sequence[Line], axis: Axis, unit: str) -> Iterator[Html]:
    """Invisible strips that tell the values at their place."""
    count = min(_STRIPS, max((len(line.points) for line in lines), default=0))
    if not count:
        return
    told: list[list[str]] = [[] for _ in range(count)]
    where: list[float | None] = [None] * count
    for line in lines:
        nearest: dict[int, tuple[float, float, float]] = {}
        for at, value in line.points:
            place = axis.place(at) * count
            number = min(count - 1, max(0, int(place)))
            distance = abs(place - number - 0.5)
            if value is not None and distance < nearest.get(number, (math.inf,))[0]:
                nearest[number] = distance, at, value
        name = f"{line.name}: " if len(lines) > 1 else ""
        for number, (_, at, value) in nearest.items():
            where[number] = at if where[number] is None else where[number]
            told[number].append(f"{name}{scales.number(value)} {unit}".rstrip())
    for number, (at_, texts) in enumerate(zip(where, told, strict=True)):
        if at_ is not None:
            left, right = (round(n * _WIDTH / count) for n in (number, number + 1))
            title = element("title", "\n".join([axis.say(at_), *texts]))
            yield element("path", title, d=box(left, 0, right - left, _HEIGHT), class_="strip")


def box(x: int, y: int, width: int, height: int) -> str:
    """The path of a rectangle."""
    return f"M{x} {y}h{width}v{height}h-{width}z"


class Part(NamedTuple):
    """A part of a bar: its colour, its name and its size."""

    colour: str
    name: str
    value: float


def bar(parts: Sequence[Part], whole: float, say: Callable[[float], str], *, tall: bool) -> Html:
    """Draw a stacked bar.

    Args:
        parts: from left to right.
        whole: what takes the full width.
        say: formats a part's size.
        tall: whether the bar is a picture of its own.
    """
    drawn, x = [], 0.0
    for part in parts:
        share = part.value / whole if whole else 0.0
        if share > 0.001:
            title = element("title", f"{part.name}: {say(part.value)} ({scales.percent(share)})")
            label = None
            if share >= _LABEL_SHARE:
                middle = f"{x + share / 2:.2%}"
                label = element("text", scales.percent(share), x=middle, y="50%")
            fill = element(
                "rect", x=f"{x:.2%}", width=f"{share:.2%}", height="100%", class_=part.colour
            )
            drawn.append(element("g", title, fill, label))
        x += share
    described = ", ".join(f"{part.name} {say(part.value)}" for part in parts if part.value > 0)
    kind = "bar tall" if tall else "bar"
    return element("svg", *drawn, class_=kind, role="img", aria_label=described)
