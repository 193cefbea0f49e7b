"""Puts the page of a run together, and writes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from horovod_runner.results import registry
from horovod_runner.results.page import hosts, logs, metrics, overview, ranks, scales
from horovod_runner.results.page.markup import (
    Html,
    Section,
    document,
    element,
    join,
    resource,
    write,
)
from horovod_runner.results.page.view import View
from horovod_runner.results.run import Run

#: In the order of the page. Each returns None where there is nothing to show.
_SECTIONS: Final[tuple[Callable[[View], Section | None], ...]] = (
    overview.verdict,
    metrics.metrics,
    ranks.time_by_rank,
    ranks.stragglers,
    ranks.over_time,
    hosts.hosts,
    ranks.lines,
    overview.failures,
    overview.checkpoints,
    logs.logs,
    overview.software,
    overview.parameters,
)


def write_page(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run to a file that only this user can read.

    Args:
        run: the run.
        path: the file; None: "<run id>.html" in the current folder.

    Returns:
        The file.

    Raises:
        OSError: the file cannot be written.
    """
    to = Path(f"{run.run_id}.html" if path is None else path)
    write(page(run), to)
    return to


def page(run: Run) -> str:
    """The page of a run: HTML that loads nothing from elsewhere."""
    view = _view(run)
    shown = [section for section in (make(view) for make in _SECTIONS) if section is not None]
    written = scales.clock_time(time.time())
    main = join(
        [
            overview.header(view),
            _contents(shown),
            *(
                element("section", element("h2", title), inner, id=name)
                for name, title, inner in shown
            ),
            element("footer", f"Written by horovod_runner on {written}."),
        ]
    )
    title = f"{run.main or 'run'} {run.run_id}: {view.status}"
    return document(title, main, script=resource(__package__, "script.js"))


def _contents(shown: list[Section]) -> Html | None:
    """Links to the sections."""
    links = [element("a", section.title, href=f"#{section.name}") for section in shown]
    return element("nav", *links, aria_label="sections") if links else None


def _view(run: Run) -> View:
    """What is known of a run's status, and until when."""
    status, until = registry.status_now(run), run.timings.end or run.recorded or run._clock()
    remark = ""
    if status == "lost":
        remark = (
            "The run had not ended when this record was written, on "
            f"{scales.clock_time(until)}, and no driver of it runs on this machine any more: it "
            "was killed, or the record is of another machine."
        )
    elif status == "running":
        remark = f"The run goes on. This is its state on {scales.clock_time(until)}."
    return View(run, status, remark, until)
