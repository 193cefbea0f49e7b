"""Rank numbers, sizes and tables as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_LINES: Final = 16  # a table with more ranks or hosts than this is shortened


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts as a table; the first column is right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == 0 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers, with runs of neighbours as ranges: "ranks 1, 3-6"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """Format numbers with runs of neighbours as ranges: "1, 3-6"."""
    groups: list[list[int]] = []
    for rank in sorted(ranks):
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with three digits."""
    number = seconds * 1e3
    return "0 ms" if number < 0.01 else f"{number:.3g} ms" if number < 1e3 else f"{number:,.0f} ms"
