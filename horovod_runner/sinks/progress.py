"""Shows the progress of a training: a bar in a terminal or notebook, otherwise lines of text.

Notebooks that have widgets show a panel (`results/panel.py`), and no bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from horovod_runner.sinks.sink import Sink, StepCounter
from horovod_runner.sinks.streams import columns, for_notices, in_notebook, write

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.wire.events import Report
    from horovod_runner.wire.measurements import Profile

_DRAW_SECONDS = 0.1
_SHOWN_METRICS = 5
_LARGE_SHARE = 0.2  # of the time, from which waiting is shown
# Below this width the bar has no room for the time since its start and for "step".
_WIDE_COLUMNS = 100
_NARROW_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{remaining}, {rate_noinv_fmt}{postfix}]"
_LEAST_BAR = 5


@dataclass(eq=False)
class Progress(Sink):
    """Shows rank 0's steps, steps per second and latest metrics, and the attempt after a restart.

    What rank 0 waits for is shown where it is a large share of its time. Nothing is shown before
    the first report. ``report(total_steps=...)`` gives the bar its end.
    """

    width: Callable[[], int] = columns
    line_seconds: float = 10.0  # between two lines of text
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._bar: Any = None
        self._lines = not (self.width() or in_notebook())
        self._line_open = False  # the program's last line of output has no end yet
        self._attempt = 1
        self._restarted = False
        self._metrics: dict[str, float | int] = {}
        self._steps = StepCounter()
        self._step = 0
        self._epoch: int | None = None
        self._total: int | None = None
        self._shown_at = 0.0
        self._paced: tuple[float, int] | None = None
        self._dirty = False
        self._waits = ""

    def attempt(self, number: int) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`, like all methods below."""
        self._attempt = number
        self._restarted = number > 1
        self._metrics, self._dirty = {}, False
        self._paced = None
        self._waits = ""
        self._steps = StepCounter()

    def profile(self, profile: Profile) -> None:
        if profile.rank != 0:
            return
        spent = {"data": "for data", "waiting": "for other ranks"}
        # A wait counts in the second in which it ends, so that a sum may be more than a second.
        seconds = max(profile.seconds, sum(profile.spent.values()))
        shares = {what: profile.spent.get(name, 0.0) / seconds for name, what in spent.items()}
        large = [f"{share:.0%} {what}" for what, share in shares.items() if share >= _LARGE_SHARE]
        self._waits = f"waits {', '.join(large)}" if large else ""

    def reports(self, reports: Sequence[Report]) -> None:
        if reports[0].rank != 0:
            return
        for report in reports:
            self._keep(report.metrics)
            self._step = self._steps.step_of(report)
            if report.epoch is not None:
                self._epoch = report.epoch
            if report.total_steps is not None:
                self._total = report.total_steps
        self._dirty = True
        now = self.clock()
        if self._paced is None:
            self._paced = now, self._step
        if now - self._shown_at >= (self.line_seconds if self._lines else _DRAW_SECONDS):
            self._show(now)

    def _keep(self, metrics: Mapping[str, float | int]) -> None:
        """Keep the latest values of the first metrics, which are all that is shown."""
        if len(self._metrics) < _SHOWN_METRICS:
            new = [name for name in metrics if name not in self._metrics]
            for name in new[: _SHOWN_METRICS - len(self._metrics)]:
                self._metrics[name] = metrics[name]
        self._metrics.update({n: metrics[n] for n in self._metrics if n in metrics})

    def end(self, run: Run) -> None:
        if run.status == "finished" and self._step + 1 == self._total:
            self._step += 1  # steps were counted from 0
            self._dirty = True
        if self._line_open and not self._lines and (self._dirty or self._bar is not None):
            write(sys.stderr, "\n")
            self._line_open = False
        if self._dirty:
            self._show(self.clock())
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(Exception):
                bar.close()

    @contextmanager
    def hidden(self, text: str) -> Iterator[None]:
        """Hide the bar while a text is written; redraw it below once the last line is complete."""
        bar = self._bar
        if bar is not None and not self._line_open:
            with suppress(Exception):
                bar.clear()
        try:
            yield
        finally:
            self._line_open = not text.endswith("\n")
            if bar is not None and not self._line_open:
                with suppress(Exception):
                    bar.refresh()

    def _show(self, now: float) -> None:
        if self._lines:
            write(for_notices(), f"HorovodRunner: {self._line(now)}\n")
        elif self._line_open:
            return
        else:
            try:
                self._draw()
            except Exception:  # a bar that cannot be drawn must not end a training
                self._lines, self._bar = True, None
        self._shown_at = now
        self._dirty = False

    def _draw(self) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm

            # tqdm's monitor thread would draw into a notebook's next cell.
            tqdm.monitor_interval = 0
            self._bar = tqdm(
                total=self._total,
                initial=self._step,
                unit=self._unit(),
                dynamic_ncols=True,
                file=sys.stderr,
                leave=True,
                smoothing=0.1,
                desc=self._description() or None,
                postfix=self._values(self._room()),
                bar_format=self._format(),
            )
            self._restarted = False
        bar, step = self._bar, self._step
        bar.set_description_str(self._description(), refresh=False)
        bar.set_postfix_str(self._values(self._room()), refresh=False)
        bar.bar_format, bar.unit = self._format(), self._unit()  # the width may have changed
        if self._total is not None and bar.total != self._total:
            bar.total = self._total
        if self._restarted or step < bar.n:
            bar.reset()
            bar.n = bar.initial = bar.last_print_n = step
            self._restarted = False
        if not bar.update(step - bar.n):
            bar.refresh()

    def _description(self) -> str:
        parts = [f"attempt {self._attempt}"] if self._attempt > 1 else []
        if self._epoch is not None:
            parts.append(f"epoch {self._epoch}")
        return ", ".join(parts)

    def _format(self) -> str | None:
        """The format of the bar; None for tqdm's own."""
        return _NARROW_FORMAT if self._is_narrow() else None

    def _unit(self) -> str:
        return "" if self._is_narrow() else "step"

    def _is_narrow(self) -> bool:
        return self._total is not None and 0 < self.width() < _WIDE_COLUMNS

    def _room(self) -> int | None:
        """The characters that metrics have beside the rest of the bar; None: any number."""
        width = self.width()
        if not width:
            return None
        count = f"{self._step}" if self._total is None else f"{self._total}/{self._total}"
        times = "00:00" if self._is_narrow() else "00:00<00:00"
        rest = f"{self._description()}: 100%|| {count} [{times}, 123.45{self._unit()}/s, ]"
        return width - len(rest) - _LEAST_BAR

    def _values(self, room: int | None = None) -> str:
        """The latest metrics, and what is waited for; a narrow terminal shows the first of them."""
        shown = [f"{name}={_short(value)}" for name, value in self._metrics.items()]
        waits = [self._waits] if self._waits else []
        fitting: list[str] = []
        for part in [*shown[:1], *waits, *shown[1:_SHOWN_METRICS]]:
            if not fitting or room is None or len(", ".join([*fitting, part])) <= room:
                fitting.append(part)
        return ", ".join(sorted(fitting, key=lambda part: part in waits))

    def _line(self, now: float) -> str:
        step = self._step
        end = f"/{self._total}" if self._total is not None else ""
        parts = [self._description(), f"step {step}{end}"]
        if self._paced is not None and now > self._paced[0] and step > self._paced[1]:
            rate = (step - self._paced[1]) / (now - self._paced[0])
            parts.append(f"{rate:.3g} steps/s")
            if self._total is not None and step < self._total:
                parts.append(f"{timedelta(seconds=round((self._total - step) / rate))} left")
        parts.append(self._values())
        return ", ".join(part for part in parts if part)


def _short(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
