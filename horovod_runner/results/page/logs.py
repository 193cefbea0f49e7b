"""The section of logs: the last lines of each rank, in the order of their time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from markupsafe import escape

from horovod_runner.results.live import as_shown
from horovod_runner.results.page.view import View
from horovod_runner.results.run import Line

_LINES: Final = 500  # of a rank
_CHARACTERS: Final = 450_000  # of all ranks
_WIDEST: Final = 2000  # characters of a line
_MARKUP: Final = 90  # characters around a line, about
_STREAMS: Final = {"stdout": "", "stderr": "e", "log": "", "notice": "n"}


class LogLine(NamedTuple):
    """A line that a rank printed; rank -1 is the runner itself."""

    time: float
    rank: int
    stream: str
    text: str


def whole_lines(pieces: Sequence[Line]) -> list[LogLine]:
    """Put pieces of output together to lines, in the order in which they began.

    Colours of terminals are left out. Of a line that was overwritten, as progress bars do, the last
    state is kept.
    """
    lines: list[LogLine] = []
    begun: dict[tuple[int, str], int] = {}  # the number of the line that has not ended yet
    for piece in pieces:
        place = piece.rank, piece.stream
        parts = piece.text.split("\n")
        if piece.stream in ("log", "notice"):
            lines.extend(LogLine(piece.time, *place, part) for part in parts)
            continue
        for number, part in enumerate(parts):
            if number == 0 and place in begun:
                old = lines[begun[place]]
                lines[begun[place]] = old._replace(text=old.text + part)
            elif part or number < len(parts) - 1:
                begun[place] = len(lines)
                lines.append(LogLine(piece.time, *place, part))
            if number < len(parts) - 1:
                begun.pop(place, None)
    return [line._replace(text=_cleaned(line.text)) for line in lines]


def _cleaned(line: str) -> str:
    line = as_shown(line)
    return line if len(line) <= _WIDEST else f"{line[:_WIDEST]} … ({len(line):,} characters)"


def last_lines(lines: Sequence[LogLine]) -> list[LogLine]:
    """The last lines of each rank, as many as a page has room for."""
    room = _CHARACTERS // max(1, len({line.rank for line in lines}))
    kept: list[LogLine] = []
    counts: Counter[int] = Counter()
    spent: Counter[int] = Counter()
    for line in reversed(lines):
        cost = len(escape(line.text)) + _MARKUP
        if counts[line.rank] < _LINES and spent[line.rank] + cost <= room:
            kept.append(line)
        counts[line.rank] += 1
        spent[line.rank] += cost  # also of lines left out: what is kept has no gaps
    return kept[::-1]


def logs(view: View) -> dict[str, Any] | None:
    """The last lines of each rank; a script of the page filters them by rank and text."""
    lines = whole_lines(view.run.logs)
    shown = last_lines(lines)
    if not shown:
        return None
    left_out, cut = len(lines) - len(shown), view.run.logs_cut
    notes = [f"{left_out:,} earlier lines are left out."] if left_out else []
    notes += [f"{cut:,} characters before them were not kept."] if cut else []
    return {
        "lines": [
            (_STREAMS.get(line.stream, ""), line.rank, _moment(line.time), line.text)
            for line in shown
        ],
        "ranks": sorted({line.rank for line in shown}),
        "notes": " ".join(notes),
    }


def _moment(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
