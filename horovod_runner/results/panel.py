"""Shows a run in a notebook: a panel of widgets while it goes on, HTML and text when it has ended.

What remains in the notebook file is the HTML and the text, which need neither a kernel nor widgets.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.results import panel_html
from horovod_runner.results.live import Live, live
from horovod_runner.sinks.progress import Progress
from horovod_runner.sinks.streams import in_notebook

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.wire.events import Report
    from horovod_runner.wire.measurements import Profile

_DRAW_SECONDS: Final = 1.5
_DRAW_SHARE: Final = 20  # with a thousand ranks drawing takes longer: at most 5% of the time
_WIDGETS_VIEW: Final = "application/vnd.jupyter.widget-view+json"
# Jupyter's server, VS Code and Colab name themselves to their kernels, and show widgets. A kernel
# of nbconvert or of a job has no such variable.
_FRONTENDS: Final = ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG")
# A page that was closed shows the widgets of a run again when it is opened: those of the last runs.
_KEPT: Final = 8
_kept: Final[deque[_Widgets]] = deque()


def progress_sink() -> Progress:
    """The panel in a notebook that has widgets; elsewhere a bar, or lines of text."""
    has_widgets = in_notebook() and find_spec("ipywidgets") is not None
    return Panel() if has_widgets else Progress()


@dataclass(eq=False)
class Panel(Progress):
    """Shows a run in the output of a cell, from its first report or step on.

    Where no frontend is known that shows widgets, lines of text are printed as well, as without a
    terminal: otherwise whoever executes a notebook without a browser would see nothing.
    """

    first_seconds: float = 1.0  # a run that is shorter loads no widgets

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lines = not any(os.environ.get(name) for name in _FRONTENDS)
        self._run: Run | None = None
        self._widgets: _Widgets | None = None
        self._due: float | None = None  # None before there is anything to show
        self._display_id = f"horovod_runner-{uuid.uuid4().hex}"

    def begin(self, run: Run) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`, like all methods below."""
        self._run = run

    def profile(self, profile: Profile) -> None:
        super().profile(profile)
        self._has_news()

    def reports(self, reports: Sequence[Report]) -> None:
        super().reports(reports)
        self._has_news()

    def _has_news(self) -> None:
        if self._due is None:
            self._due = time.monotonic() + self.first_seconds

    def idle(self) -> None:
        began = time.monotonic()
        if self._due is None or began < self._due or self._run is None:
            return
        try:
            self._draw_widgets(live(self._run))
        except Exception:  # a panel that cannot be drawn must not end a training
            self._lines, self._due = True, None
            self._run = None
            return
        now = time.monotonic()
        self._due = now + max(_DRAW_SECONDS, _DRAW_SHARE * (now - began))

    def _draw_widgets(self, now: Live) -> None:
        if self._widgets is not None:
            self._widgets.update(now)
            return
        from IPython.display import display

        self._widgets = _Widgets(now)
        _kept.append(self._widgets)
        if len(_kept) > _KEPT:
            _kept.popleft().close()
        data = {_WIDGETS_VIEW: self._widgets.view, "text/plain": panel_html.text(now)}
        display(data, raw=True, display_id=self._display_id)

    def end(self, run: Run) -> None:
        if self._lines:
            super().end(run)
        if self._due is None:
            return
        with suppress(Exception):
            from IPython.display import display, update_display

            now = live(run)
            data = {"text/html": panel_html.page(now), "text/plain": panel_html.text(now)}
            if self._widgets is None:
                display(data, raw=True)
            else:
                self._widgets.update(now)
                update_display(data, raw=True, display_id=self._display_id)

    def _show(self, now: float) -> None:
        if self._lines:
            super()._show(now)


class _Widgets:
    """The panel as widgets. Parts that the user has opened or folded stay so after an update."""

    def __init__(self, now: Live) -> None:
        import ipywidgets

        self._head, self._ranks, self._output = (ipywidgets.HTML() for _ in range(3))
        self._folds = ipywidgets.Accordion([self._ranks, self._output], selected_index=0)
        self._box = ipywidgets.VBox([self._head, self._folds])
        self._folds.set_title(1, panel_html.LINES_TITLE)
        self.update(now)

    @property
    def view(self) -> dict[str, Any]:
        """What a frontend needs to show it."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def update(self, now: Live) -> None:
        """Show what the run is doing now; sends what has changed."""
        self._folds.set_title(0, panel_html.ranks_title(now))
        self._head.value = panel_html.head(now)
        self._ranks.value = panel_html.ranks(now)
        self._output.value = panel_html.lines(now)

    def close(self) -> None:
        """Remove it from the kernel and the frontends."""
        for widget in (self._box, self._folds, self._head, self._ranks, self._output):
            widget.layout.close()
            widget.close()
