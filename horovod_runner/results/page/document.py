"""Puts the page of a run together, and writes it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from horovod_runner.host.folders.folder import local_path
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.results import registry
from horovod_runner.results.page import logs, overview, ranks
from horovod_runner.results.page.numbers import clock_time
from horovod_runner.results.page.templates import render, write
from horovod_runner.results.page.view import KINDS, View
from horovod_runner.results.run import Run


def write_page(run: Run, path: str | os.PathLike[str] | None = None) -> Path | str:
    """Write the page of a run to a file; on this machine only this user can read it."""
    local = local_path(path) if isinstance(path, str) else path
    if isinstance(path, str) and local is None:
        folder, _, name = path.rpartition("/")
        open_folder(folder, check=True).write(name, page(run).encode())
        return path
    to = Path(f"{run.run_id}.html" if local is None else local)
    write(page(run), to)
    return to


def page(run: Run) -> str:
    """The page of a run: HTML that loads nothing from elsewhere."""
    view = _view(run)
    pictures = _pictures(view)
    host_charts = pictures.pop("hosts", {"charts": [], "means": {}, "cores": []})
    # In the order of the page; what has nothing to show is left out.
    sections = {
        "verdict": ("Verdict", overview.verdict(view)),
        "metrics": ("Metrics by step", pictures.get("metrics")),
        "ranks": ("Time by rank", ranks.time_by_rank(view)),
        "stragglers": ("Who waits for whom", pictures.get("stragglers")),
        "time": ("Steps over time", pictures.get("time")),
        "hosts": ("Hosts", view.by_host and host_charts),
        "lines": ("Lines of code", ranks.lines(view)),
        "failures": ("Failures", overview.failures(view)),
        "checkpoints": ("Checkpoints", overview.checkpoints(view)),
        "logs": ("Logs", logs.logs(view)),
        "software": ("Software", dict(sorted(run.software.items()))),
        "parameters": ("Parameters", overview.parameters(view)),
    }
    return render(
        __package__,
        "run.html",
        script="script.js",
        view=view,
        run=run,
        kinds=KINDS,
        facts=overview.facts(view),
        errors=overview.errors(view),
        missing=pictures.get("missing", ""),
        hosts=overview.hosts(view, host_charts["means"]),
        sections={name: each for name, each in sections.items() if each[1]},
        written=clock_time(time.time()),
    )


def _pictures(view: View) -> dict[str, Any]:
    """What the sections with charts show, or why there are none."""
    try:
        from horovod_runner.results.page import charts, metrics, over_time
    except ImportError as error:
        return {
            "missing": f"The page has no charts, because matplotlib draws them ({error}). Install "
            "it and write the page again: pip install 'horovod_runner[plot]'"
        }
    timeline = over_time.timeline_of_profile(view)
    found: dict[str, Any] = {}
    with charts.style():
        found |= {"metrics": metrics.metrics(view), "hosts": over_time.hosts(view)}
        if timeline is not None:
            found["stragglers"] = over_time.stragglers(view, timeline)
            found["time"] = over_time.over_time(view, timeline)
    return found


def _view(run: Run) -> View:
    """What is known of a run's status, and until when."""
    status, until = registry.status_now(run), run._until
    remark = ""
    if status == "lost":
        remark = (
            "The run had not ended when this record was written, on "
            f"{clock_time(until)}, and no driver of it runs on this machine any more: it "
            "was killed, or the record is of another machine."
        )
    elif status == "running":
        remark = f"The run goes on. This is its state on {clock_time(until)}."
    return View(run, status, remark, until)
