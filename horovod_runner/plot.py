"""Draws a run's metrics."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import matplotlib.figure

# (attempt, step, value), in order.
Points = Sequence[tuple[int, int | None, float]]

_PANELS_A_ROW = 2
_PANELS = 20  # where none is named
_POINTS = 5_000  # more than a picture shows
_ALONE = 60  # of so few points each one is marked


def plot(
    series: Mapping[str, Points],
    names: Sequence[str],
    title: str,
    resumed: Mapping[int, int | None],
) -> matplotlib.figure.Figure:
    """A figure with a panel for each metric: its value by step, each attempt a line.

    Args:
        series: all that there are, by name.
        names: which to draw; all where none is named.
        title: stands above.
        resumed: by attempt, the step that it went on from.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no such metric.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib: pip install 'horovod_runner[plot]'"
        ) from error
    shown = names or [name for name in series if name != "total_steps"][:_PANELS]
    for name in shown:
        if name not in series:
            there = ", ".join(list(series)[:_PANELS]) or "none: main did not call report()"
            raise ValueError(f"no metric {name!r} was reported; there are: {there}")
    columns = min(_PANELS_A_ROW, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))

    class Picture(Figure):
        """A cell's last value shows itself, without any setting of the notebook."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    # A Figure of its own: pyplot would keep it, and show it a second time in a notebook.
    figure = Picture(figsize=(5.5 * columns, 3.2 * rows), layout="constrained")
    for index, name in enumerate(shown):
        _draw(figure.add_subplot(rows, columns, index + 1), name, series[name], resumed)
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw(axes: Any, name: str, points: Points, resumed: Mapping[int, int | None]) -> None:
    stride = max(1, len(points) // _POINTS)
    attempts: dict[int, tuple[list[float], list[float]]] = {}
    for at, (attempt, step, value) in enumerate(points):
        if at % stride == 0 or at == len(points) - 1:
            xs, ys = attempts.setdefault(attempt, ([], []))
            xs.append(at if step is None else step)
            ys.append(value)
    for attempt, (xs, ys) in attempts.items():
        marker = "." if len(xs) <= _ALONE else None
        label = f"attempt {attempt}" if len(attempts) > 1 else None
        (line,) = axes.plot(xs, ys, marker=marker, linewidth=1.3, label=label)
        if attempt > min(attempts):
            began = resumed.get(attempt)
            axes.axvline(
                xs[0] if began is None else began,
                color=line.get_color(),
                linestyle=":",
                linewidth=1,
            )
    axes.set_title(name, fontsize="medium")
    axes.set_xlabel("step" if any(step is not None for _, step, _ in points) else "report")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(attempts) > 1:
        axes.legend(fontsize="small", title="dotted: restarted", title_fontsize="small")
