"""The sections in words: header, verdict, failures, checkpoints, software and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from horovod_runner.common.text import ranks_text, spans, without_password, without_secret
from horovod_runner.results.page.numbers import clock_time, duration, number, size
from horovod_runner.results.page.view import KINDS, TimePart, View
from horovod_runner.results.run import DETAILS_LEFT_OUT, Attempt

_MOST_HOSTS: Final = 200  # of the table
_MOST_ERRORS: Final = 5  # in full, of 64 KB each at most
_SHORT: Final = 1000  # characters of an earlier one


def facts(view: View) -> dict[str, str]:
    """The main numbers of the run."""
    run, step = view.run, view.found.step
    found = {
        "ranks": f"{len(run.ranks) or 'not started'} (np={run.np})",
        "where": run.where or "unknown",
        "began": clock_time(run.timings.queued),
        "duration": duration(view.end - run.timings.queued),
    }
    if step is not None and step.seconds:
        found["steps per second"] = number(1 / step.seconds)
    if len(run.attempts) > 1:
        found["launches"] = f"{run.attempts[-1].number:,}"
    if run.controller:
        found["controller"] = "MPI" if run.controller == "mpi" else "Gloo"
    return found


def errors(view: View) -> list[str]:
    """The error of the last launch, and warnings."""
    last = [without_password(attempt.error) for attempt in view.run.attempts[-1:]]
    return [error for error in last if error] + list(view.run.warnings)


def verdict(view: View) -> dict[str, Any] | None:
    """What the diagnosis says, and the parts of a step."""
    found, step = view.found, view.found.step
    if not found.ranks:
        return None
    parts = []
    if step is not None and step.seconds:
        parts = [TimePart(colour, words, getattr(step, name)) for name, words, colour in KINDS]
    legend = [(f"{each.name} {duration(each.value)}", each.colour) for each in parts if each.value]
    said = str(found).splitlines()[-1]
    return {"found": found, "said": said, "parts": parts, "legend": legend}


def failures(view: View) -> dict[str, Any] | None:
    """All launches, if one of them failed: the title of each, and its whole error."""
    attempts = view.run.attempts
    if not any(attempt.error for attempt in attempts):
        return None
    codes: dict[int, list[int]] = {}
    for info in view.run.ranks:
        if info.exit_code:
            codes.setdefault(info.exit_code, []).append(info.rank)
    full = [each.number for each in attempts if each.error][-_MOST_ERRORS:]
    return {
        "attempts": [
            (
                _title(view, each),
                _text(each) if each.number in full else without_password(each.error)[:_SHORT],
            )
            for each in attempts
        ],
        "cut": view.run.attempts_cut,
        "ends": "; ".join(f"{ranks_text(some)}: exit code {code}" for code, some in codes.items()),
    }


def _text(attempt: Attempt) -> str:
    whole = attempt.details or attempt.error
    if attempt.details == DETAILS_LEFT_OUT:
        whole = f"{attempt.error}\n\n{DETAILS_LEFT_OUT}"
    return without_password(whole)


def _title(view: View, attempt: Attempt) -> str:
    last = attempt is view.run.attempts[-1]
    how = "failed" if attempt.error else view.status if last else "ended"
    if attempt.error and last and view.status == "cancelled":
        how = "cancelled"
    ended = view.end if attempt.ended is None else attempt.ended
    step = attempt.resumed_from
    began = "" if step is None else f", from the checkpoint of step {step:,}"
    return f"Attempt {attempt.number} {how} after {duration(ended - attempt.started)}{began}"


def hosts(view: View, means: dict[str, dict[str, str]]) -> tuple[list[str], list[list[str]], int]:
    """A table of hosts: its head, its rows, and how many hosts it lacks."""
    gpus: dict[str, set[str]] = {}
    for info in view.run.ranks:
        gpus.setdefault(info.host, set()).update(info.gpus)
    rows = [
        [
            *(host, spans(ranks), f"{len(ranks):,}", ", ".join(sorted(gpus[host])) or "none"),
            *(each.get(host, "") for each in means.values()),
        ]
        for host, ranks in list(view.by_host.items())[:_MOST_HOSTS]
    ]
    heads = ["host", "ranks", "count", "GPUs", *(title.lower() for title in means)]
    return heads, rows, len(view.by_host) - len(rows)


def checkpoints(view: View) -> list[list[str]]:
    """A row for each checkpoint, the latest last."""
    return [
        [
            f"{each.step:,}",
            ", ".join(f"{name} {number(value)}" for name, value in each.metrics.items()),
            size(each.size),
            clock_time(each.saved_at),
            f"{each.attempt}",
            f"{without_password(each.path)}{'' if _exists(each.path) else ' (removed)'}",
        ]
        for each in view.run.checkpoints
    ]


def _exists(path: str) -> bool:
    """Whether a file of this machine exists; files elsewhere are assumed to."""
    try:
        return not path.startswith("/") or Path(path).exists()
    except OSError:
        return True


def parameters(view: View) -> dict[str, object]:
    """The arguments of ``main`` that are numbers and short texts."""
    return {name: without_secret(name, value) for name, value in view.run.params.items()}
