"""The sections on the time of ranks: by rank, who waits for whom, over time, and by line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import dropwhile
from math import inf
from statistics import median
from typing import Final

from horovod_runner.common.text import spans
from horovod_runner.results.page import scales
from horovod_runner.results.page.charts import (
    Line,
    Part,
    bar,
    key,
    line_chart,
    time_axis,
)
from horovod_runner.results.page.heat_map import Row, heat_map
from horovod_runner.results.page.markup import Html, Section, element, section, table
from horovod_runner.results.page.timeline import Timeline
from horovod_runner.results.page.view import KINDS, View
from horovod_runner.results.slowness.flame import flame_graph
from horovod_runner.wire.measurements import Profile, Thread, steps_of

_MOST_BARS: Final = 40
_LEAST_WAITING, _MOST_WAITING = 16, 8  # shown of more ranks
_MOST_ROWS: Final = 64  # of the heat map
_MOST_GRAPHS: Final = 6
_GRAPH_CHARACTERS: Final = 1_000_000  # of all graphs
_LEAST_PIXELS: Final = 2.4  # of 1200: calls below 0.2% are left out of a flame graph
_THREADS: Final[dict[Thread, str]] = {"main": "", "loader": ", processes of its DataLoader"}
_IMPORT: Final = "<frozen "
_RUNNER: Final = re.compile(r"<frozen |[/\\]horovod_runner[/\\](worker|warm)[/\\]")


def _parts(view: View, rank: int) -> list[Part]:
    """The seconds of a step of a rank by kind; of a second where no steps were counted."""
    total = view.totals[rank]
    count = total.step_count or total.seconds or 1.0
    seconds = {name: spent / count for name, spent in view.spent(rank, total.spent).items()}
    seconds["compute"] = max(0.0, total.seconds / count - sum(seconds.values()))
    return [Part(colour, words, seconds[name]) for name, words, colour in KINDS]


def time_by_rank(view: View) -> Section | None:
    """A bar for each rank: of all, or of those that wait least and most."""
    parts = {rank: _parts(view, rank) for rank, total in view.totals.items() if total.seconds > 0}
    if not parts:
        return None
    chosen, remark = sorted(parts), ""
    if len(parts) > _MOST_BARS:
        by_wait = sorted(parts, key=lambda rank: (parts[rank][2].value, -parts[rank][0].value))
        chosen = sorted({*by_wait[:_LEAST_WAITING], *by_wait[-_MOST_WAITING:]})
        remark = (
            f" Of {len(parts):,} ranks: the {_LEAST_WAITING} that wait least for others, the "
            f"{_MOST_WAITING} that wait most, and the median of all."
        )
    shown = [(view.name(rank), parts[rank], rank == view.suspect) for rank in chosen]
    if remark:
        middle = [
            Part(some[0].colour, some[0].name, median(part.value for part in some))
            for some in zip(*parts.values(), strict=True)
        ]
        shown.append((f"median of {len(parts):,}", middle, False))
    whole = max(sum(part.value for part in some) for _, some, _ in shown)
    rows = [
        element(
            "div",
            element("span", name, class_="name suspect" if is_suspect else "name"),
            bar(some, whole, scales.duration, tall=False),
            element("span", scales.duration(sum(part.value for part in some)), class_="value"),
            class_="row",
        )
        for name, some, is_suspect in shown
    ]
    what = "step" if view.found.step is not None else "second"
    used = {part.colour: part.name for some in parts.values() for part in some if part.value > 0}
    return section(
        "ranks",
        "Time by rank",
        element("p", f"Where an average {what} of each rank goes.{remark}", class_="lead"),
        key((colour, words) for _, words, colour in KINDS if colour in used),
        element("div", *rows, class_="rows"),
        _details(view, parts),
    )


def _details(view: View, parts: dict[int, list[Part]]) -> Html:
    compared = view.run.profile.compared
    heads = ["rank", "host", "steps", *(words for _, words, _ in KINDS), "last", "CPU"]
    rows = []
    for rank, some in parts.items():
        total = view.totals[rank]
        rows.append(
            [
                f"{rank}",
                view.hosts.get(rank, ""),
                f"{total.step_count:,}",
                *(scales.duration(part.value) for part in some),
                scales.percent(total.last / compared) if compared else "",
                f"{total.cpu / total.seconds:.2f}",
            ]
        )
    return element(
        "details",
        element("summary", "All ranks as a table"),
        element(
            "p",
            "Times are of a step. “Last” is the share of the compared collectives in which all "
            "others waited for this rank; “CPU” is the number of busy cores of its process.",
            class_="note",
        ),
        table(heads, rows, "r-" + "r" * 9),
    )


def stragglers(view: View) -> Section | None:
    """A heat map: which rank waits for others, and when."""
    timeline = view.timeline
    waits = any(view.spent(rank, total.spent)["waiting"] for rank, total in view.totals.items())
    if timeline is None or len(view.rows) < 2 or not waits:
        return None
    shares = {rank: _shares(view, timeline, rank, rows) for rank, rows in sorted(view.rows.items())}
    ranks = list(shares)
    group = -(-len(ranks) // _MOST_ROWS)
    rows, of_group = [], ""
    for first in range(0, len(ranks), group):
        some = ranks[first : first + group]
        label = view.name(some[0]) if group == 1 else f"ranks {spans(some)}"
        rows.append(Row(label, _least([shares[rank] for rank in some])))
    if group > 1:
        of_group = f" A row stands for {group} ranks, and shows the one that waits least."
    return section(
        "stragglers",
        "Who waits for whom",
        view.lead(
            "Light: the rank waits for other ranks. Dark: it does not wait. A dark row in a light "
            f"picture is the rank that all others wait for.{of_group}"
        ),
        heat_map(
            rows,
            time_axis(timeline.seconds),
            "of its time waiting for other ranks",
            marks=view.restarts(timeline.start),
        ),
    )


def _shares(view: View, timeline: Timeline, rank: int, rows: list[Profile]) -> list[float | None]:
    def waiting(row: Profile) -> tuple[float]:
        return (view.spent(rank, row.spent)["waiting"],)

    sums = timeline.sums(rows, waiting, view.offsets.get(rank, 0.0))
    return [None if cell is None else min(1.0, cell[1] / cell[0]) for cell in sums]


def _least(shares: Sequence[list[float | None]]) -> list[float | None]:
    """In each column the lowest known share."""
    return [
        min((share for share in column if share is not None), default=None)
        for column in zip(*shares, strict=True)
    ]


def over_time(view: View) -> Section | None:
    """Steps per second, the share of each kind of time, and the bytes that are reduced."""
    timeline = view.timeline
    if timeline is None:
        return None

    def amounts(row: Profile) -> tuple[float, ...]:
        spent = view.spent(row.rank, row.spent).values()
        return (steps_of(row.steps), row.bytes, max(0.0, row.seconds - sum(spent)), *spent)

    sums = [
        timeline.sums(rows, amounts, view.offsets.get(rank, 0.0))
        for rank, rows in view.rows.items()
    ]
    rates = [_mean(column) for column in zip(*sums, strict=True)]

    def line(
        index: int, factor: float, name: str = "", colour: str = "c0", most: float = inf
    ) -> Line:
        points = [
            (timeline.middle(number), None if cell is None else min(most, cell[index] / factor))
            for number, cell in enumerate(rates)
        ]
        return Line(name, points, colour)

    axis, marks = time_axis(timeline.seconds), view.restarts(timeline.start)
    factor, prefix = scales.scale([cell[1] for cell in rates if cell is not None])
    kinds = [
        line(2 + number, 0.01, words, colour, most=100)  # a wait is counted where it ends
        for number, (name, words, colour) in enumerate(KINDS)
        if any(cell is not None and cell[2 + number] > 0.001 for cell in rates)
    ]
    charts = [
        line_chart("Steps", [line(0, 1.0)], axis, unit="per second", from_zero=True, marks=marks),
        line_chart("Time of the ranks", kinds, axis, unit="%", from_zero=True, marks=marks),
    ]
    if any(cell is not None and cell[1] for cell in rates):
        unit = f"{prefix}B per second and rank"
        charts.append(
            line_chart("Reduced", [line(1, factor)], axis, unit=unit, from_zero=True, marks=marks)
        )
    return section(
        "time",
        "Steps over time",
        view.lead("Averages over all ranks." if len(sums) > 1 else ""),
        element("div", *charts, class_="panels"),
    )


def _mean(cells: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """Amounts per second over all ranks of which something is known."""
    known = [cell for cell in cells if cell is not None]
    if not known:
        return None
    seconds, *amounts = (sum(column) for column in zip(*known, strict=True))
    return tuple(amount / seconds for amount in amounts)


def lines(view: View) -> Section | None:
    """Flame graphs of the chosen ranks, and of the processes of their DataLoaders."""
    graphs: list[Html] = []
    for rank in _with_graph(view):
        for thread, of in _THREADS.items():
            stacks = view.run.profile.lines(rank, thread)
            own = [(own_calls(stack), share) for stack, share in stacks]
            graph = Html(flame_graph(own, "share of the looks", _LEAST_PIXELS))
            if not stacks or sum(map(len, graphs)) + len(graph) > _GRAPH_CHARACTERS:
                continue
            named = " (the verdict names it)" if rank == view.suspect else ""
            graphs.append(
                element(
                    "details",
                    element("summary", f"{view.name(rank)}{of}{named}"),
                    element("div", graph, class_="scroll flame", tabindex="0"),
                    name="flame",
                    open=not graphs,
                )
            )
    if not graphs:
        return None
    return section(
        "lines",
        "Lines of code",
        element(
            "p",
            "The width of a box is the share of time that was spent in that call; above it is what "
            "it has called. Warm colours are your files, cold ones libraries.",
            class_="lead",
        ),
        *graphs,
    )


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
