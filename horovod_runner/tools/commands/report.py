"""`horovod-runner report`: writes the page of a run, and lists the runs that have a record."""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from horovod_runner.common.text import align_columns
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host.folders.folder import local_path
from horovod_runner.results import registry, run_log, saved_run


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    report = commands.add_parser(
        "report",
        help="write a page about a run: where its time went, metrics, hosts, logs, failures",
        description="Write one HTML file about a run of this user on this machine: its verdict, "
        "metrics, the time of its ranks, hosts, flame graphs, failures, checkpoints and logs. The "
        "file loads nothing from elsewhere. Only its owner can read it, because it shows what the "
        "run printed. A run that still goes on is shown as it is now.",
    )
    report.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="its id as ps or --list shows it, the start of the id, or the path or URL of a record "
        "(default: the latest run)",
    )
    report.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file to write (default: the run's id and .html, in the current folder)",
    )
    report.add_argument(
        "--list", action="store_true", help="list the runs that have a record, the latest first"
    )
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    if options.list:
        print(_listing())
        return 0
    if options.run is not None and local_path(options.run) is None:
        found = saved_run.load_run(options.run)
    else:
        found = run_log.load(_record(options.run))
    try:
        path = found.report(options.output)
    except OSError as error:
        raise HorovodRunnerError(
            f"the page of run {found.run_id} cannot be written: {error}. Name a file in a folder "
            "that exists and that you can write to: -o FILE"
        ) from error
    if find_spec("matplotlib") is None:
        print(
            "horovod-runner: the page has no charts, because matplotlib is not installed: "
            "pip install 'horovod_runner[plot]'",
            file=sys.stderr,
        )
    print(path)
    return 0


def _record(run: str | None) -> Path:
    """The record of a run; of one that goes on as it is now."""
    if run is not None and (path := saved_run.record_at(run)) is not None:
        return path
    going_on = registry.running(run or "")
    for run_id in going_on if run is not None else going_on[:1]:
        if not registry.write_log(run_id):
            print(
                f"horovod-runner: the driver of run {run_id} did not write its record within 10 s: "
                "the page shows an older one, if there is one",
                file=sys.stderr,
            )
    return saved_run.find(run)


def _listing() -> str:
    """The runs that have a record as a table, the latest first."""
    rows = [["run", "main", "np", "where", "status", "began", "duration"]]
    for recorded, each in saved_run.summaries():
        seconds = (each.timings.end or recorded) - each.timings.queued
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.timings.queued))
        status = registry.status_now(each)
        rows.append(
            [each.run_id, each.main, f"{each.np}", each.where, status, began, _hours(seconds)]
        )
    return align_columns(rows) if len(rows) > 1 else "no runs"


def _hours(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
