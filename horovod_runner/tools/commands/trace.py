"""`horovod-runner trace`: writes one trace of a run for Perfetto or Chrome."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results.saved_run import load_run


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    trace = commands.add_parser(
        "trace",
        help="write one trace of a run for Perfetto or Chrome",
        description="Write one trace of an ended run of this user: a process for each rank and "
        "each host, on one clock, with what --timeline and --torch-profiler have recorded. Open it "
        "at https://ui.perfetto.dev.",
    )
    trace.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="the run's id, the start of it, or the file of its record (default: the latest run)",
    )
    trace.add_argument(
        "-o",
        "--output",
        default="trace.json.gz",
        metavar="FILE",
        help="the file to write, compressed if its name ends in .gz (default: %(default)s)",
    )
    trace.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    run = load_run(options.run)
    try:
        missing = run.trace(options.output)
    except OSError as error:
        raise HorovodRunnerError(f"the trace cannot be written: {error}") from error
    for sentence in missing:
        print(f"horovod-runner: {sentence}", file=sys.stderr)
    print(f"run {run.run_id} ({run.main}): {options.output}")
    return 0
