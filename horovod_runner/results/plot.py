"""Draws metrics of a run by step, with matplotlib: ``runner.last_run.plot()``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import matplotlib.figure

    from horovod_runner.results.run import Run

# (attempt, step, value) in the order of arrival.
Points = Sequence[tuple[int, int | None, float]]

_PANELS_PER_ROW = 2
_MAX_PANELS = 20  # if no metric is named
_MAX_POINTS = 5_000  # a picture cannot show more
_MAX_MARKED_POINTS = 60  # up to this many points are drawn with a mark


def plot_epochs(history: Mapping[str, Sequence[float]], title: str) -> matplotlib.figure.Figure:
    """Return a figure with a panel per metric: its value by epoch, from 1 on."""
    series = {
        name: [(1, epoch, value) for epoch, value in enumerate(values, 1)]
        for name, values in history.items()
    }
    return plot(series, (), title, {})


def plot_run(run: Run, names: Sequence[str], rank: int) -> matplotlib.figure.Figure:
    """Return the figure of a run; see :meth:`Run.plot`."""
    metrics, title = run._metrics, f"np={run.np}, {run.status}"
    resumed = {attempt.number: attempt.resumed_from for attempt in run.attempts}
    why_none = "main did not call report()"
    if rank and set(metrics.ranks) == {0}:
        why_none = 'only rank 0\'s reports are kept. Set DebugConfig(report_ranks="all")'
    return plot(metrics.series(rank), names, title, resumed, why_none)


def plot(
    series: Mapping[str, Points],
    names: Sequence[str],
    title: str,
    resumed: Mapping[int, int | None],
    why_none: str = "",
) -> matplotlib.figure.Figure:
    """Return a figure with a panel per metric: its value by step, one line per attempt.

    ``resumed`` has the step that an attempt resumed from; None if it started from step 0.
    ``why_none`` is the reason that an error gives where ``series`` is empty.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib: pip install 'horovod_runner[plot]'"
        ) from error
    shown = names or list(series)[:_MAX_PANELS]
    for name in shown:
        if name not in series:
            known = ", ".join(list(series)[:_MAX_PANELS]) or f"none: {why_none}"
            raise ValueError(f"no metric {name!r} was reported; reported metrics: {known}")
    columns = min(_PANELS_PER_ROW, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))

    class Picture(Figure):
        """A figure that a notebook shows as the last value of a cell, without settings."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    # Not created by pyplot, which would keep it and show it a second time in a notebook.
    figure = Picture(figsize=(5.5 * columns, 3.2 * rows), layout="constrained")
    for index, name in enumerate(shown):
        _draw(figure.add_subplot(rows, columns, index + 1), name, series[name], resumed)
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw(axes: Any, name: str, points: Points, resumed: Mapping[int, int | None]) -> None:
    stride = max(1, len(points) // _MAX_POINTS)
    attempts: dict[int, tuple[list[float], list[float]]] = {}
    for index, (attempt, step, value) in enumerate(points):
        if index % stride == 0 or index == len(points) - 1:
            xs, ys = attempts.setdefault(attempt, ([], []))
            xs.append(index if step is None else step)
            ys.append(value)
    for attempt, (xs, ys) in attempts.items():
        marker = "." if len(xs) <= _MAX_MARKED_POINTS else None
        label = f"attempt {attempt}" if len(attempts) > 1 else None
        (line,) = axes.plot(xs, ys, marker=marker, linewidth=1.3, label=label)
        if attempt > min(attempts):
            first_step = resumed.get(attempt)
            axes.axvline(
                xs[0] if first_step is None else first_step,
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
