"""Puts the page of a run together, and writes it."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Final

from horovod_runner.results import registry
from horovod_runner.results.page import hosts, logs, metrics, overview, ranks, scales
from horovod_runner.results.page.markup import Html, Section, element, join
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
    text = page(run)
    with open(to, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text.encode(errors="replace"))
    return to


def page(run: Run) -> str:
    """The page of a run: HTML that loads nothing from elsewhere."""
    view = _view(run)
    shown = [section for section in (make(view) for make in _SECTIONS) if section is not None]
    style, script = _resource("style.css"), _resource("script.js")
    # Whatever an error in this package lets through: the browser runs this script alone, and loads
    # nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; form-action 'none'; base-uri 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{run.main or 'run'} {run.run_id}: {view.status}"),
        element("style", Html(style)),
    )
    written = scales.clock_time(time.time())
    body = element(
        "body",
        element(
            "main",
            overview.header(view),
            _contents(shown),
            *(
                element("section", element("h2", title), inner, id=name)
                for name, title, inner in shown
            ),
            element("footer", f"Written by horovod_runner on {written}."),
        ),
        element("script", Html(script)),
    )
    return join([Html("<!doctype html>\n"), element("html", head, body, lang="en")])


def _contents(shown: list[Section]) -> Html | None:
    """Links to the sections."""
    links = [element("a", section.title, href=f"#{section.name}") for section in shown]
    return element("nav", *links, aria_label="sections") if links else None


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _view(run: Run) -> View:
    """What is known of a run's status, and until when."""
    status, until = registry.status_now(run), run.timings.end or run.recorded or time.time()
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
