"""Draws runs with rich for ``horovod-runner top``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Group
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from horovod_runner.common.text import bytes_text, count_text, duration_text, rate_text
from horovod_runner.results.live import Live, LiveRank, Others, Shares

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from horovod_runner.tools.commands.top import Seen

# For each of Shares, in order: name, colour, and character, also for terminals without Unicode.
_PARTS: Final = (
    ("compute", "green", "█", "#"),
    ("wait for data", "yellow", "▓", "="),
    ("wait for the slowest rank", "red", "▒", ":"),
    ("reduce", "blue", "░", "-"),
    ("report, checkpoint", "magenta", "▚", "+"),
)
_STATUS: Final = {"running": "green", "finished": "cyan", "failed": "red", "cancelled": "yellow"}
_WIDEST: Final = 100  # columns of a bar
_WIDE: Final = 116  # columns from which all that is known of a rank is shown
_PACE: Final = 24  # columns of the bar that says how many steps are done, at most


class Bar:
    """Where the time goes, as a bar of several parts."""

    def __init__(self, shares: Shares, width: int = _WIDEST) -> None:
        self._shares = msgspec.structs.astuple(shares)
        self._width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(self._width, options.max_width)
        ends = [round(width * min(1.0, end)) for end in accumulate(self._shares)]
        bar = Text(no_wrap=True)
        for begin, end, part in zip([0, *ends], ends, _PARTS, strict=False):
            bar.append(part[3 if options.ascii_only else 2] * (end - begin), part[1])
        yield bar

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = min(self._width, options.max_width)
        return Measurement(width, width)


class Legend:
    """The names of a bar's parts, with their numbers; no part is broken over two lines."""

    def __init__(self, shares: Shares) -> None:
        self._shares = msgspec.structs.astuple(shares)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text(no_wrap=True)
        for share, (name, colour, *glyphs) in zip(self._shares, _PARTS, strict=True):
            if share < 0.005 and name != "compute":
                continue
            entry = Text.assemble((glyphs[options.ascii_only], colour), f" {name} {share:.0%}")
            if line and len(line) + 3 + len(entry) > options.max_width:
                yield line
                line = Text(no_wrap=True)
            line = Text("   ").join([line, entry]) if line else entry
        yield line


@dataclass(frozen=True)
class _View:
    """Runs to show, in at most ``height`` lines; None does not limit them."""

    runs: Sequence[Seen]
    height: int | None = None


class Overview(_View):
    """All runs, a block of lines each; a single run in detail."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        if len(self.runs) == 1:
            yield Detail(self.runs, self.height)
            return
        if not self.runs:
            yield Text("no runs")
        room = float("inf") if self.height is None else self.height - 1
        for number, seen in enumerate(self.runs):
            block = [Text()] * bool(number) + [*_head(seen)]
            if seen.live is not None:
                block += [_cut(line, "dim") for line in seen.live.lines[-1:]]
            room -= _height(block, console, options)
            if room < 0 and number:
                left = len(self.runs) - number
                yield Text(f"and {left} more: horovod-runner ps lists them", "dim")
                return
            yield from block


class Detail(_View):
    """One run with its ranks and last lines; ``runs`` is empty if it has ended."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        for seen in self.runs:
            head = list(_head(seen))
            yield from head
            if seen.live is not None:
                room = self.height
                if room is not None:
                    room -= _height(head, console, options)
                yield from _body(seen.live, room, wide=options.max_width >= _WIDE)
        if not self.runs:
            yield Text("the run has ended")


def _body(live: Live, room: int | None, *, wide: bool) -> Iterator[RenderableType]:
    """The ranks and the last lines, in some lines of a terminal; two thirds are for the ranks."""
    ranks, others, lines = live.ranks, live.others, live.lines
    if room is not None:
        # Beside them are two empty lines, the head of the table, and notes on other ranks.
        room -= 4 + (others is not None)
        ranks = ranks[: max(1, room - min(len(lines), room // 3))]
        lines = lines[-max(1, room - len(ranks)) :]
    if ranks:
        yield Text()
        yield from _ranks(ranks, others, len(live.ranks) - len(ranks), wide=wide)
    if lines:
        yield Text()
        yield from map(_cut, lines)


def _cut(line: str, style: str = "") -> Text:
    return Text(line, style, no_wrap=True, overflow="ellipsis")


def _height(shown: Sequence[RenderableType], console: Console, options: ConsoleOptions) -> int:
    """How many lines are drawn."""
    return len(console.render_lines(Group(*shown), options, pad=False))


def _head(seen: Seen) -> Iterator[RenderableType]:
    """A run's name and state, its progress, and where its time goes."""
    live, entry = seen.live, seen.entry
    if live is None:
        title = Text(seen.run_id, "bold")
        if entry is not None:
            title.append(f"  {entry.main}  np={entry.np}  {entry.where}", "not bold")
        yield title
        yield Text(seen.problem or "asks its driver", "yellow")
        return
    yield _title(live)
    if seen.problem:
        yield Text(f"as of {duration_text(live.elapsed)}: {seen.problem}", "yellow")
    if live.error:
        yield _cut(live.error, "red")
    if live.size:
        yield _pace(live)
    if live.shares is not None:
        yield Bar(live.shares)
        yield Legend(live.shares)
    if live.numbers:
        yield Text("   ".join(live.numbers))
    if live.verdict:
        yield Text(live.verdict, "yellow")


def _title(live: Live) -> Text:
    ranks = count_text(live.size, "rank") if live.size else f"np={live.np}"
    title = Text.assemble(
        (live.run_id, "bold"),
        f"  {live.main}  ",
        (live.status, _STATUS.get(live.status, "")),
        f"  {ranks} on {live.where}  {duration_text(live.elapsed)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    if live.restarts:
        title.append(f"  attempt {live.attempt}", "red")
    if not live.size and live.status == "running":
        title.append("  its ranks start", "dim")
    return title


def _pace(live: Live) -> RenderableType:
    """Steps, a progress bar if their number is known, and how fast they are."""
    if live.step is None:
        return Text("no step so far", "dim")
    cells: list[RenderableType] = [Text(live.how_far)]
    if live.done is not None:
        cells.append(ProgressBar(total=1.0, completed=live.done))
        cells.append(Text(f"{live.step / (live.total_steps or 1):.0%}"))
    cells += [Text(each, style) for each, style in zip(live.pace, ("", "dim"), strict=False)]
    grid = Table.grid(padding=(0, 2))
    for cell in cells:
        bar = isinstance(cell, ProgressBar)  # it becomes shorter first
        grid.add_column(no_wrap=not bar, max_width=_PACE if bar else None)
    grid.add_row(*cells)
    return grid


def _ranks(
    ranks: Sequence[LiveRank], others: Others | None, left_out: int, *, wide: bool
) -> Iterator[Table | Text]:
    """The table of ranks; it has more columns where there is room."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=30 if wide else 10)
    if wide:
        table.add_column("process", justify="right")
    table.add_column("steps/s", justify="right")
    table.add_column("where its time goes" if wide else "its time")
    for name in ("compute", "data", "ranks", "reduce", "calls") if wide else ("data", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("CPU", justify="right")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("cores", justify="right", no_wrap=True)
    for rank in ranks:
        process = [str(rank.pid or "")] * wide
        measured = _measured(rank, wide=wide)
        table.add_row(str(rank.rank), rank.host, *process, *measured, rank.cores)
    if others is not None:
        measured = _measured(others, wide=wide)
        table.add_row(f"{others.count:,}", "others", *[""] * wide, *measured, style="dim")
    yield table
    if left_out:
        yield Text(f"and {left_out} more, for which there is no room", "dim")


def _measured(shown: LiveRank | Others, *, wide: bool) -> Iterator[RenderableType]:
    shares = shown.shares
    yield "" if shown.rate is None else rate_text(shown.rate)
    if isinstance(shown, LiveRank) and shown.is_quiet:
        yield Text(f"no step {duration_text(shown.silent or 0.0)}", "red", no_wrap=True)
    else:
        yield "" if shares is None else Bar(shares, 30 if wide else 17)
    parts = () if shares is None else msgspec.structs.astuple(shares)
    for number in range(len(_PARTS)) if wide else (1, 2):
        yield f"{parts[number]:.0%}" if parts else ""
    yield "" if shown.cpu is None else f"{shown.cpu:.1f}"
    yield "" if shown.memory is None else bytes_text(shown.memory)
