"""What the benchmarks share: the machine in words, verdicts, a table and the raw data."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("horovod", "pyspark", "torch")


def machine() -> str:
    """Cores, memory and versions; nothing that names this machine."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    python = f"Python {platform.python_version()}"
    return ", ".join([f"{cores} cores", f"{memory:.0f} GiB", python, *versions])


def at_least(ratio: float, target: float) -> list[str]:
    """The cells of a ratio that is better when larger: the ratio, its target, the verdict."""
    return [f"{ratio:.1f}", f">= {target:g}", _verdict(ratio >= target)]


def at_most(ratio: float, target: float) -> list[str]:
    """The cells of a ratio that is better when smaller."""
    return [f"{ratio:.2f}", f"<= {target:g}", _verdict(ratio <= target)]


def _verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
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
    """Write the raw data, with the machine it comes from."""
    path.write_text(json.dumps({"machine": machine(), **data}, indent=2) + "\n")
