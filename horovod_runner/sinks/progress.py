"""Shows how a training goes: a bar in a terminal or notebook, lines where there is neither."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from horovod_runner.sinks import Sink, is_terminal, write

if TYPE_CHECKING:
    from horovod_runner.messages import Report
    from horovod_runner.result import Run

_LINE_SECONDS = 10.0
_DRAW_SECONDS = 0.1
_TOTAL = "total_steps"
_SHOWN_METRICS = 5


class Progress(Sink):
    """Rank 0's steps, steps a second and latest metrics, and the attempt after a restart.

    Nothing is shown before the first report that has a step or a metric. With ``total_steps`` among
    the metrics the bar has an end.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._lines = not (is_terminal() or _in_notebook())
        self._attempt = 1
        self._metrics: dict[str, float | int] = {}
        self._step: int | None = None
        self._epoch: int | None = None
        self._total: int | None = None
        self._count = 0
        self._shown_at = 0.0
        self._paced: tuple[float, int] | None = None
        self._dirty = False

    def attempt(self, number: int) -> None:
        """See :class:`~horovod_runner.sinks.Sink`; so for all below."""
        self._attempt = number
        self._paced = None
        self._count = 0

    def report(self, report: Report) -> None:
        if report.rank != 0:
            return
        self._metrics.update(report.metrics)
        total = self._metrics.pop(_TOTAL, None)
        if total is not None and math.isfinite(total):
            self._total = int(total)
        self._count += 1
        self._step = self._count if report.step is None else report.step
        self._epoch = report.epoch if report.epoch is not None else self._epoch
        self._dirty = True
        now = time.monotonic()
        if self._paced is None:
            self._paced = now, self._step
        if now - self._shown_at >= (_LINE_SECONDS if self._lines else _DRAW_SECONDS):
            self._show(now)

    def end(self, run: Run) -> None:
        if self._dirty:
            self._show(time.monotonic())
        if self._bar is not None:
            done = run.status == "finished" and self._total is not None
            if hasattr(self._bar, "disp") and done:
                self._bar.disp(bar_style="success")
            self._bar.close()
            self._bar = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """While something else is written: the bar comes back below it."""
        if self._bar is None:
            yield
            return
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()

    def _show(self, now: float) -> None:
        self._shown_at = now
        self._dirty = False
        if self._lines:
            write(sys.stderr, f"HorovodRunner: {self._line(now)}\n")
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            # Its own thread would draw into a notebook's next cell.
            tqdm.monitor_interval = 0
            self._bar = tqdm(
                total=self._total,
                initial=self._step or 0,
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
                leave=True,
                smoothing=0.1,
            )
        bar = self._bar
        if self._total is not None and bar.total != self._total:
            bar.reset(total=self._total) if hasattr(bar, "container") else None
            bar.total = self._total
        bar.set_description_str(self._description(), refresh=False)
        bar.set_postfix_str(self._values(), refresh=False)
        step = self._step or 0
        if step < bar.n:  # a restart goes on from before
            bar.n = bar.initial = step
            bar.last_print_n = step
        bar.update(step - bar.n)
        bar.refresh()

    def _description(self) -> str:
        parts = [f"attempt {self._attempt}"] if self._attempt > 1 else []
        if self._epoch is not None:
            parts.append(f"epoch {self._epoch}")
        return ", ".join(parts)

    def _values(self) -> str:
        shown = list(self._metrics.items())[:_SHOWN_METRICS]
        return ", ".join(f"{name}={_short(value)}" for name, value in shown)

    def _line(self, now: float) -> str:
        step = self._step or 0
        of = f"/{self._total}" if self._total is not None else ""
        parts = [self._description(), f"step {step}{of}"]
        if self._paced is not None and now > self._paced[0] and step > self._paced[1]:
            parts.append(f"{(step - self._paced[1]) / (now - self._paced[0]):.3g} steps/s")
        parts.append(self._values())
        return ", ".join(part for part in parts if part)


def _short(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel, where tqdm draws with widgets, or as text without them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
