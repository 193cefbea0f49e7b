"""Shared code of the benchmarks: description of the machine, targets, tables and raw data."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = ("horovod", "pyspark", "torch")


def machine(*packages: str) -> str:
    """Cores, memory and versions of this machine, without its name.

    Args:
        packages: further packages; those that are not installed are left out.
    """
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for name in (*_PACKAGES, *packages):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    python = f"Python {platform.python_version()}"
    return ", ".join([f"{cores} cores", f"{memory:.0f} GiB", python, *versions])


class Judged(NamedTuple):
    """A figure that has a target.

    Attributes:
        what: the figure's name: "8 MB, torch.distributed / ours".
        value: the measured value.
        target: the target for the value.
        larger: whether larger values are better.
        unit: the unit; empty for a ratio.
    """

    what: str
    value: float
    target: float
    larger: bool
    unit: str

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value >= self.target if self.larger else self.value <= self.target


judged: list[Judged] = []  # of this benchmark, for the raw data


def at_least(what: str, value: float, target: float, unit: str = "") -> list[str]:
    """The table cells of a figure that should be large: value, target, verdict."""
    told = rounded(value, target, 1)
    return [told, f">= {target:g}", _judge(Judged(what, value, target, True, unit))]


def at_most(what: str, value: float, target: float, unit: str = "") -> list[str]:
    """The table cells of a figure that should be small: value, target, verdict."""
    told = rounded(value, target, 2) if isinstance(value, float) else str(value)
    return [told, f"<= {target:g}", _judge(Judged(what, value, target, False, unit))]


def rounded(value: float, target: float, places: int) -> str:
    """The value with at least ``places`` decimals, and enough to differ from its target."""
    while value != target and round(value, places) == target:
        places += 1
    return f"{value:,.{places}f}"


def _judge(figure: Judged) -> str:
    if figure not in judged:  # the table of an unfinished run is made several times
        judged.append(figure)
    return "met" if figure.met else "NOT MET"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column aligned to the left, the others to the right."""
    widths = [max(2, *(len(row[i]) for row in (heads, *rows))) for i in range(len(heads))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in (heads, rule, *rows)
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write the raw data with date, machine and the figures that have targets."""
    told = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "judged": [each._asdict() for each in judged],
        **data,
    }
    path.write_text(anonymous(json.dumps(told, indent=2)) + "\n")


def anonymous(text: str) -> str:
    """The text without this machine's folders and name."""
    root = Path(__file__).resolve().parent.parent
    places = {f"{root}/": "", sys.prefix: "python", tempfile.gettempdir(): "tmp"}
    places |= {sys.base_prefix: "python", str(Path.home()): "~"}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return re.sub(rf"\b{re.escape(platform.node())}\b", "host", text) if platform.node() else text
