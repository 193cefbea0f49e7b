"""Draws charts with matplotlib: SVG without scripts, whose texts are text.

Black becomes the colour of the page's text, for light and dark pages. What the pointer is over is
told by script.js, from the paths and from ``Chart.told``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from horovod_runner.results.page.view import COLOURS

Numbers = NDArray[np.float64]
#: How many lines a chart has colours for.
MAX_LINES: Final = len(COLOURS)
_DASHES: Final = ("-", (0, (5, 2)), "-", (0, (1, 1.5)), "-", (0, (6, 2, 1, 2)))
_STYLE: Final = {
    "font.size": 9,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "page",  # the same run gives the same page
    "path.simplify": False,
    "axes.grid": True,
    "grid.color": "black",
    "grid.alpha": 0.12,
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 8,
    "ytick.major.pad": 6,
}
_STEPS: Final = (1, 2, 2.5, 5, 10)  # between labels
_LARGEST: Final = 1e300  # of larger numbers differences are infinite
# What matplotlib writes for files that stand alone; fonts are those of the page.
_OUTER: Final = re.compile(
    r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>"
    r"|font-family: [^;\"]*;? ?| id=\"[\w.]*_\d+\"",
    re.DOTALL,
)
_VERTEX: Final = re.compile(r"([ML]) (-?[\d.]+) (-?[\d.]+) \n")


@dataclass(frozen=True)
class Curve:
    """A line of a chart: its name, and its values, which are NaN where they are not known."""

    name: str
    xs: Numbers
    ys: Numbers
    colour: str = COLOURS[0]


@dataclass(frozen=True)
class Chart:
    """A picture and what is written around it.

    Attributes:
        label: what it shows, for those who do not see it.
        told: what script.js needs to tell values.
    """

    svg: str
    label: str
    told: Mapping[str, Any]
    title: str = ""
    unit: str = ""
    legend: Sequence[tuple[str, str]] = field(default_factory=list)
    note: str = ""


def style() -> AbstractContextManager[None]:
    """Inside it all charts have the look of the page, whatever matplotlib is set to."""
    return matplotlib.style.context(["default", _STYLE])


def line_chart(
    title: str,
    lines: Sequence[Curve],
    x_label: str,
    *,
    unit: str = "",
    from_zero: bool = False,
    ends: tuple[float, float] | None = None,
    marks: Mapping[int, float] | None = None,
    band: tuple[Numbers, Numbers] | None = None,
    note: str = "",
) -> Chart | None:
    """Draw at most :data:`MAX_LINES` lines; None where no line has two points.

    ``marks`` are where attempts began, by number, and ``band`` is an area behind the first line.
    Steps and reports on the horizontal axis are whole numbers.
    """
    lines = [replace(e, ys=np.where(np.abs(e.ys) < _LARGEST, e.ys, np.nan)) for e in lines]
    if all(len(np.unique(line.xs[np.isfinite(line.ys)])) < 2 for line in lines):
        return None
    figure, axes = _axes(3.4, 2.1)
    for line, dashes in zip(lines, _DASHES, strict=False):
        known = np.isfinite(np.concatenate([[np.nan], line.ys, [np.nan]]))
        alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])
        axes.plot(
            *(line.xs, line.ys), color=line.colour, linestyle=dashes, gid="line", marker=".",
            markevery=alone.tolist(),
        )  # fmt: skip
    legend = [(line.name, line.colour) for line in lines] if len(lines) > 1 or band else []
    if band is not None:
        axes.fill_between(lines[0].xs, *band, color=lines[0].colour, alpha=0.22, linewidth=0)
        legend.append(("lowest to highest", f"{lines[0].colour}38"))
    _mark(axes, marks or {})
    if ends is not None:
        axes.set_xlim(*ends)
    if from_zero:
        highest = np.fmax.reduce(np.concatenate([*(line.ys for line in lines), *(band or ())]))
        axes.set_ylim(0, 1.08 * highest or 1)
    axes.set_xlabel(x_label)
    whole = x_label in ("step", "report")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=_STEPS, integer=whole))
    if whole:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=_STEPS))
    told = {"names": [line.name for line in lines] if len(lines) > 1 else [""], "unit": unit}
    svg, told = _drawn(figure, axes, told)
    return Chart(svg, f"{title} {unit} by {x_label}", told, title, unit, legend, note)


def heat_map(
    rows: Mapping[str, Numbers],
    labels: Sequence[str],
    x_label: str,
    ends: tuple[float, float],
    marks: Mapping[int, float],
) -> Chart:
    """Draw shares by row and time, 0 as the darkest colour; NaN where they are not known.

    The pointer tells the keys of ``rows``.
    """
    shares = np.array(list(rows.values()))
    figure, axes = _axes(5, 0.8 + 2.5 * min(1, len(rows) / 20))
    extent = (*ends, len(rows) - 0.5, -0.5)
    most = max(0.05, np.fmax.reduce(shares, None))
    image = axes.imshow(
        *(shares, "Blues_r"), aspect="auto", interpolation="none", vmin=0, vmax=most, extent=extent
    )
    _mark(axes, marks)
    axes.grid(visible=False)
    axes.set_ylabel("rank")
    axes.set_xlabel(x_label)
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: labels[int(y)] if y in range(len(labels)) else "")
    )
    bar = figure.colorbar(image, format=PercentFormatter(1, 0), pad=0.01, aspect=15)
    bar.outline.set_visible(False)
    percents = [[None if np.isnan(x) else round(100 * x) for x in row] for row in shares.tolist()]
    svg, told = _drawn(figure, axes, {"names": list(rows), "cells": percents})
    return Chart(svg, "share of the time in which ranks wait for others, by rank and time", told)


def _mark(axes: Any, marks: Mapping[int, float]) -> None:
    axes.set_xlim(axes.get_xlim())  # marks do not widen the axis
    for number, x in marks.items():
        axes.axvline(x, color="black", linestyle="--", linewidth=1, gid=f"attempt-{number}")


def _axes(width: float, height: float) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, height), dpi=72, layout="constrained")
    return figure, figure.add_subplot()


def _drawn(figure: Any, axes: Any, told: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A figure as SVG for a page, and where its axes are."""
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    width, height = figure.get_size_inches() * 72
    box = axes.get_position()
    svg = _VERTEX.sub(
        lambda found: f"{found[1]}{float(found[2]):.2f} {float(found[3]):.2f}",
        _OUTER.sub("", written.getvalue()),
    )
    svg = svg.replace('<g id="line">', '<g class="line">').replace("#000000", "currentColor")
    svg = re.sub(r'<g id="attempt-(\d+)">', r"<g><title>attempt \1</title>", svg)
    return svg, {
        **told,
        "box": [box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height],
        "x": axes.get_xlim(),
        "y": axes.get_ylim(),
        "label": axes.get_xlabel(),
    }
