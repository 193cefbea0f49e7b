"""Draws a run for a notebook: HTML that stays readable without its styles, and plain text.

GitHub, for one, removes all styles and scripts of a notebook, and keeps tables and ``<details>``.
The markup is in page/panel.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from horovod_runner.common.text import bytes_text, duration_text, rate_text
from horovod_runner.results.live import LiveRank

if TYPE_CHECKING:
    from markupsafe import Markup

    from horovod_runner.results.live import Live, Others, Shares

# Of Shares, in its order: the name and the colour, on a light and a dark page.
_PARTS: Final = (
    ("compute", "#4c9f70"),
    ("wait for data", "#e0a100"),
    ("wait for the slowest rank", "#d1495b"),
    ("reduce", "#3d7ea6"),
    ("report, checkpoint", "#8e6cab"),
)
# Of the table of ranks: the name, and what is shown when the pointer is over it.
_COLUMNS: Final = (
    ("rank", ""),
    ("host", ""),
    ("process", ""),
    ("steps/s", ""),
    ("its time", "where the time of its main thread goes"),
    ("compute", ""),
    ("data", "wait for data"),
    ("ranks", "wait for the slowest rank"),
    ("CPU", "cores that its process uses"),
    ("memory", "of its process and those that it has started"),
    ("cores", "busy cores of its host, of those that it may use"),
)
_STATUS: Final = {
    "running": "#3d7ea6",
    "finished": "#4c9f70",
    "failed": "#d1495b",
    "cancelled": "#e0a100",
}
LINES_TITLE: Final = "the last lines"


def draw(part: str, *values: object) -> Markup:
    """Markup by a macro of panel.html; texts among its arguments are escaped, markup is not."""
    # Not imported by a run that nobody draws.
    from horovod_runner.results.page.templates import macros

    markup: Markup = getattr(macros("panel.html", colours=_STATUS), part)(*values)
    return markup


def head(live: Live) -> Markup:
    """What the run is, how far it is, and where its time goes."""
    texts = _facts(live), _steps(live), ", ".join(live.numbers)
    return draw("head", live, *texts, _parts(live.shares))


def ranks(live: Live) -> Markup:
    """The table of ranks."""
    rows: list[list[object]] = [
        [rank.rank, rank.host, rank.pid or "", *_measured(rank), rank.cores] for rank in live.ranks
    ]
    if live.others is not None:
        rows.append([f"{live.others.count:,}", "others", "", *_measured(live.others), ""])
    return draw("table", _COLUMNS, rows)


def lines(live: Live) -> Markup:
    """The last lines that were printed."""
    return draw("pre", "\n".join(live.lines))


def page(live: Live) -> Markup:
    """All of it, without widgets."""
    return head(live) + draw("details", folded(live))


def folded(live: Live) -> list[tuple[str, Markup]]:
    """The parts that are folded at first, each with its title."""
    parts = [(ranks_title(live), ranks(live)), (LINES_TITLE, lines(live))]
    shown = zip(parts, (live.ranks, live.lines), strict=True)
    return [part for part, there in shown if there]


def ranks_title(live: Live) -> str:
    """What is written above the table of ranks."""
    return f"{live.size:,} rank{'s' * (live.size != 1)}"


def text(live: Live) -> str:
    """The same in plain text, without the ranks."""
    found = [f"{live.main}: {live.status}, {_facts(live)}"]
    found += [each for each in (live.error, _steps(live)) if each]
    if live.shares is not None:
        found.append(" | ".join(f"{name} {share:.0%}" for name, share, _ in _parts(live.shares)))
    found += [each for each in (", ".join(live.numbers), live.verdict) if each]
    return "\n".join(found)


def _facts(live: Live) -> str:
    attempt = f", attempt {live.attempt}" if live.restarts else ""
    return f"{ranks_title(live)} on {live.where}, {duration_text(live.elapsed)}{attempt}"


def _steps(live: Live) -> str:
    """How far the run is, and how fast; empty before it has a step."""
    if live.step is None:
        return ""
    done = f" ({live.step / live.total_steps:.0%})" if live.total_steps else ""
    return ", ".join([f"{live.how_far}{done}", *live.pace])


def _measured(shown: LiveRank | Others) -> Iterator[str]:
    """Cells of a row: what is known of a rank or of several."""
    shares = shown.shares
    yield "" if shown.rate is None else rate_text(shown.rate)
    if isinstance(shown, LiveRank) and shown.is_quiet:
        yield f"no step for {duration_text(shown.silent or 0.0)}"
    else:
        yield "" if shares is None else draw("bar", _parts(shares), 10, "7em")
    known = (None,) * 3 if shares is None else (shares.compute, shares.data, shares.waiting)
    yield from ("" if share is None else f"{share:.0%}" for share in known)
    yield "" if shown.cpu is None else f"{shown.cpu:.1f}"
    yield "" if shown.memory is None else bytes_text(shown.memory)


def _parts(shares: Shares | None) -> list[tuple[str, float, str]]:
    """The name, the share and the colour of each part of the time."""
    known = () if shares is None else msgspec.structs.astuple(shares)
    return [(name, share, colour) for share, (name, colour) in zip(known, _PARTS, strict=False)]
