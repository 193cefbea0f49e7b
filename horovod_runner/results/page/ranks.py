"""The sections on the time of ranks: a bar for each, and the lines that it was seen at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import dropwhile
from statistics import median
from typing import Any, Final

from horovod_runner.results.page.view import KINDS, TimePart, View
from horovod_runner.results.slowness.flame import flame_graph
from horovod_runner.wire.measurements import Thread

_MOST_BARS: Final = 40
_LEAST_WAITING, _MOST_WAITING = 16, 8  # shown of more ranks
_MOST_IN_TABLE: Final = 1000
_MOST_GRAPHS: Final = 6
_GRAPH_CHARACTERS: Final = 300_000  # of all graphs
_LEAST_PIXELS: Final = 2.4  # of 1200: calls below 0.2% are left out of a flame graph
_THREADS: Final[dict[Thread, str]] = {"main": "", "loader": ", processes of its DataLoader"}
_IMPORT: Final = "<frozen "
_RUNNER: Final = re.compile(r"<frozen |[/\\]horovod_runner[/\\](worker|task[/\\]warm)[/\\]")


def _parts(view: View, rank: int) -> list[TimePart]:
    """The seconds of a step of a rank by kind; of a second where no steps were counted."""
    total = view.totals[rank]
    count = total.step_count or total.seconds or 1.0
    seconds = {name: spent / count for name, spent in view.spent(rank, total.spent).items()}
    seconds["compute"] = max(0.0, total.seconds / count - sum(seconds.values()))
    return [TimePart(colour, words, seconds[name]) for name, words, colour in KINDS]


def time_by_rank(view: View) -> dict[str, Any] | None:
    """A bar for each rank, or for those that wait least and most; and a table of all ranks."""
    parts = {rank: _parts(view, rank) for rank, total in view.totals.items() if total.seconds > 0}
    if not parts:
        return None
    chosen, remark = sorted(parts), ""
    if len(parts) > _MOST_BARS:
        by_wait = sorted(parts, key=lambda rank: (parts[rank][2].value, -parts[rank][0].value))
        chosen = sorted({*by_wait[:_LEAST_WAITING], *by_wait[-_MOST_WAITING:]})
        remark = (
            f"Of {len(parts):,} ranks: the {_LEAST_WAITING} that wait least for others, the "
            f"{_MOST_WAITING} that wait most, and the median of all."
        )
    bars = [(view.name(rank), rank == view.suspect, parts[rank]) for rank in chosen]
    if remark:
        middle = [
            TimePart(some[0].colour, some[0].name, median(part.value for part in some))
            for some in zip(*parts.values(), strict=True)
        ]
        bars.append((f"median of {len(parts):,}", False, middle))
    used = {part.colour for some in parts.values() for part in some if part.value > 0}
    return {
        "legend": [(words, colour) for _, words, colour in KINDS if colour in used],
        "bars": bars,
        "whole": max(sum(part.value for part in some) for _, _, some in bars),
        "remark": remark,
        "parts": dict(list(parts.items())[:_MOST_IN_TABLE]),
        "more": max(0, len(parts) - _MOST_IN_TABLE),
    }


def lines(view: View) -> list[tuple[str, str]]:
    """Flame graphs of the chosen ranks, and of the processes of their DataLoaders."""
    graphs: list[tuple[str, str]] = []
    room = _GRAPH_CHARACTERS
    for rank in _with_graph(view):
        for thread, of in _THREADS.items():
            stacks = view.run.profile.lines(rank, thread)
            own = [(own_calls(stack), share) for stack, share in stacks]
            graph = flame_graph(own, "share of the looks", _LEAST_PIXELS)
            if stacks and len(graph) <= room:
                room -= len(graph)
                named = " (the verdict names it)" if rank == view.suspect else ""
                graphs.append((f"{view.name(rank)}{of}{named}", graph))
    return graphs


def own_calls(stack: Sequence[str]) -> list[str]:
    """A stack without the runner's calls around ``main``, and without those of Python's import."""
    inner = [call for call in dropwhile(_RUNNER.search, stack) if not call.startswith(_IMPORT)]
    return inner or list(stack[-1:])


def _with_graph(view: View) -> list[int]:
    """The suspect, rank 0, and others at equal distances."""
    ranks = sorted(view.rows)
    stride = max(1, len(ranks) // (_MOST_GRAPHS - 1))
    wanted = [view.suspect, 0, *ranks[::stride]]
    return list(dict.fromkeys(rank for rank in wanted if rank is not None))[:_MOST_GRAPHS]
