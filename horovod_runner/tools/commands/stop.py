"""`horovod-runner stop`: ends runs of this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from horovod_runner.results import registry


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    stop = commands.add_parser(
        "stop",
        help="end a run and its worker processes",
        description="End runs. The driver ends all ranks, on all hosts, and raises "
        "CancelledError. If the driver is gone, all processes of the run on this machine are "
        "ended.",
    )
    which = stop.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "run", nargs="?", metavar="RUN", help="its id as ps shows it, or the start of the id"
    )
    which.add_argument("--all", action="store_true", help="all runs of this user on this machine")
    stop.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for a driver to end its ranks (default: %(default)g)",
    )
    stop.set_defaults(command=_stop)


def _stop(options: argparse.Namespace) -> int:
    runs = registry.find()
    if options.all and not runs:
        print("no runs")
    status = 0
    for listed in runs if options.all else [registry.find_one(runs, options.run)]:
        problem = registry.stop(listed, options.timeout)
        print(f"{listed.run_id}: {problem or 'ended'}", file=sys.stderr if problem else sys.stdout)
        status = status or bool(problem)
    return int(status)
