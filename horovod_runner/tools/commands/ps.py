"""`horovod-runner ps`: lists the runs of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from horovod_runner.results import registry


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    ps = commands.add_parser(
        "ps",
        help="list the runs of this machine",
        description="List the runs whose driver is on this machine, and worker processes here "
        "whose driver is elsewhere or gone.",
    )
    ps.add_argument("--json", action="store_true", help="print JSON")
    ps.set_defaults(command=_ps)


def _ps(options: argparse.Namespace) -> int:
    runs = registry.find()
    print(registry.as_json(runs) if options.json else registry.table(runs))
    return 0
