"""Draws a run for a notebook: HTML that stays readable without its styles, and plain text.

GitHub, for one, removes all styles and scripts of a notebook, and keeps tables and ``<details>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

import msgspec

from horovod_runner.common.text import bytes_text, duration_text, rate_text

if TYPE_CHECKING:
    from horovod_runner.results.live import Live, LiveRank, Others, Shares

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
_HOST: Final = 1
_CELL: Final = "padding:0 .5em;line-height:1.6;white-space:nowrap"
_STATUS: Final = {
    "running": "#3d7ea6",
    "finished": "#4c9f70",
    "failed": "#d1495b",
    "cancelled": "#e0a100",
}
_GREY: Final = "rgba(128,128,128,.25)"
_LEAST: Final = 0.005  # parts of a time that are smaller are not named
_QUIET_SECONDS: Final = 5.0  # from which a rank without a summary is marked


def head(live: Live) -> str:
    """What the run is, how far it is, and where its time goes."""
    parts = [_title(live)]
    if live.error:
        parts.append(f'<div style="color:{_STATUS["failed"]}">{escape(live.error)}</div>')
    if live.step is not None:
        if live.total_steps:
            done = min(1.0, live.step / live.total_steps)
            parts.append(_bar([(done, _STATUS[live.status], f"{done:.0%}")], 6))
        parts.append(f"<div>{escape(pace(live))}</div>")
    if live.shares is not None:
        parts += [_shares_bar(live.shares, 14), f"<div>{_legend(live.shares)}</div>"]
    if numbers := _numbers(live):
        parts.append(f"<div>{escape(numbers)}</div>")
    if live.verdict:
        mark = f"border-left:3px solid {_PARTS[1][1]};padding-left:.6em;margin-top:.3em"
        parts.append(f'<div style="{mark}">{escape(live.verdict)}</div>')
    return f'<div style="max-width:60em;line-height:1.6">{"".join(parts)}</div>'


def ranks(live: Live) -> str:
    """The table of ranks."""
    heads = (f'<th title="{full}" style="{_CELL}">{name}</th>' for name, full in _COLUMNS)
    rows = ["".join(heads)]
    for rank in live.ranks:
        cores = "" if rank.host_cores is None else f"{rank.host_cores:.1f}/{rank.of_cores}"
        where = [str(rank.rank), escape(rank.host), str(rank.pid or "")]
        rows.append(_row([*where, *_measured(rank, rank.silent), cores]))
    if live.others is not None:
        where = [f"{live.others.count:,}", "others", ""]
        rows.append(_row([*where, *_measured(live.others, None), ""]))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<table style="font-size:90%;margin:0">{body}</table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def lines(live: Live) -> str:
    """The last lines that were printed."""
    return f'<pre style="margin:0">{escape(chr(10).join(live.lines))}</pre>'


def page(live: Live) -> str:
    """All of it, without widgets."""
    return head(live) + details(folded(live))


def details(parts: Sequence[tuple[str, str]]) -> str:
    """Folded parts, of their titles and what is below them, which are markup."""
    return "".join(f"<details><summary>{name}</summary>{body}</details>" for name, body in parts)


def folded(live: Live) -> list[tuple[str, str]]:
    """The parts that are folded at first, each with its title, which is markup like the part."""
    parts = [(ranks_title(live), ranks(live)), (LINES_TITLE, lines(live))]
    shown = zip(parts, (live.ranks, live.lines), strict=True)
    return [part for part, there in shown if there]


LINES_TITLE: Final = "the last lines"


def ranks_title(live: Live) -> str:
    """What is written above the table of ranks."""
    return f"{live.size:,} rank{'s' * (live.size != 1)}"


def text(live: Live) -> str:
    """The same in plain text, without the ranks."""
    found = [f"{live.main}: {live.status}, {_facts(live)}"]
    if live.error:
        found.append(live.error)
    if live.step is not None:
        found.append(pace(live))
    if live.shares is not None:
        shares = zip(_PARTS, msgspec.structs.astuple(live.shares), strict=True)
        found.append(" | ".join(f"{part[0]} {share:.0%}" for part, share in shares))
    found += [each for each in (_numbers(live), live.verdict) if each]
    return "\n".join(found)


def _title(live: Live) -> str:
    status = f'<b style="color:{_STATUS[live.status]}">{live.status}</b>'
    run = f' title="run {escape(live.run_id)}"'
    return f"<div><b{run}>{escape(live.main)}</b> {status} {escape(_facts(live))}</div>"


def _facts(live: Live) -> str:
    attempt = f", attempt {live.attempt}" if live.restarts else ""
    return f"{ranks_title(live)} on {live.where}, {duration_text(live.elapsed)}{attempt}"


def pace(live: Live) -> str:
    """How far the run is, and how fast."""
    step, total = live.step or 0, live.total_steps
    found = [] if live.epoch is None else [f"epoch {live.epoch}"]
    found.append(f"step {step:,}" + (f" of {total:,} ({step / total:.0%})" if total else ""))
    if live.rate is not None and live.status == "running":
        found.append(f"{rate_text(live.rate)} steps/s")
        if total and live.rate and step < total:
            found.append(f"{duration_text((total - step) / live.rate)} left")
    return ", ".join(found)


def _numbers(live: Live) -> str:
    found = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in live.metrics.items()
    ]
    if live.memory is not None:
        found.append(f"memory {bytes_text(live.memory)}")
    if live.checkpoint is not None:
        found.append(f"checkpoint of step {live.checkpoint:,}")
    return ", ".join(found)


def _measured(shown: LiveRank | Others, silent: float | None) -> Iterator[str]:
    """Cells of a row: what is known of a rank or of several."""
    shares = shown.shares
    yield "" if shown.rate is None else rate_text(shown.rate)
    if silent is not None and silent > _QUIET_SECONDS:
        yield f"no step for {duration_text(silent)}"
    else:
        yield "" if shares is None else _shares_bar(shares, 10, "7em")
    if shares is None:
        yield from ("", "", "")
    else:
        yield from (f"{each:.0%}" for each in (shares.compute, shares.data, shares.waiting))
    yield "" if shown.cpu is None else f"{shown.cpu:.1f}"
    yield "" if shown.memory is None else bytes_text(shown.memory)


def _row(cells: Sequence[str]) -> str:
    sides = ("left" if number == _HOST else "right" for number in range(len(cells)))
    return "".join(
        f'<td style="{_CELL};text-align:{side}">{cell}</td>'
        for side, cell in zip(sides, cells, strict=True)
    )


def _shares_bar(shares: Shares, height: int, width: str = "100%") -> str:
    named = zip(msgspec.structs.astuple(shares), _PARTS, strict=True)
    return _bar(
        [(share, colour, f"{name} {share:.0%}") for share, (name, colour) in named], height, width
    )


def _bar(parts: Sequence[tuple[float, str, str]], height: int, width: str = "100%") -> str:
    """A bar of several parts: (share, colour, what it says when the pointer is over it)."""
    inner = "".join(
        f'<div title="{title}" style="width:{share:.2%};background:{colour}"></div>'
        for share, colour, title in parts
    )
    style = f"display:flex;height:{height}px;width:{width};background:{_GREY};margin:.2em 0"
    return f'<div style="{style};border-radius:3px;overflow:hidden">{inner}</div>'


def _legend(shares: Shares) -> str:
    named = zip(msgspec.structs.astuple(shares), _PARTS, strict=True)
    return " &nbsp; ".join(
        f'<span style="white-space:nowrap"><span style="color:{colour}">&#9632;</span> '
        f"{name} {share:.0%}</span>"
        for share, (name, colour) in named
        if share >= _LEAST or name == "compute"
    )
