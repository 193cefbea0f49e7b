"""The sections in words: header, verdict, failures, checkpoints, software and parameters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from horovod_runner.common.text import ranks_text, without_password, without_secret
from horovod_runner.results.page import scales
from horovod_runner.results.page.charts import Part, bar, key
from horovod_runner.results.page.markup import Html, Section, element, section, table
from horovod_runner.results.page.view import KINDS, View
from horovod_runner.results.run import DETAILS_LEFT_OUT, Attempt


def header(view: View) -> Html:
    """The first lines: which run it is, how it ended, and its main numbers."""
    run, step = view.run, view.found.step
    began = run.timings.queued
    facts: list[tuple[str, Html | str]] = [
        ("ranks", f"{len(run.ranks) or 'not started'} (np={run.np})"),
        ("where", run.where or "unknown"),
        (
            "began",
            element(
                "time",
                scales.clock_time(began),
                datetime=time.strftime("%FT%TZ", time.gmtime(began)),
            ),
        ),
        ("duration", scales.duration(view.end - began)),
    ]
    if step is not None and step.seconds:
        facts.append(("steps per second", scales.number(1 / step.seconds)))
    if len(run.attempts) > 1:
        facts.append(("launches", f"{run.attempts[-1].number:,}"))
    if run.controller:
        facts.append(("controller", "MPI" if run.controller == "mpi" else "Gloo"))
    error = without_password(run.attempts[-1].error) if run.attempts else ""
    return element(
        "header",
        element(
            "h1",
            element("span", run.main or "run", class_="main"),
            element("span", run.run_id, class_="id"),
            element("span", view.status, class_=f"status {view.status}"),
        ),
        element("p", view.remark, class_="remark") if view.remark else None,
        element("p", error, class_="error") if error else None,
        *(element("p", warning, class_="error") for warning in run.warnings),
        _pairs(facts, "facts"),
    )


def _pairs(pairs: Iterable[tuple[str, Html | str]], kind: str) -> Html:
    items = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", *items, class_=kind)


def verdict(view: View) -> Section | None:
    """What the diagnosis says."""
    found, step = view.found, view.found.step
    if not found.ranks:
        return None
    if step is None or not step.seconds:
        return section("verdict", "Verdict", element("p", str(found)))
    parts = [Part(colour, words, getattr(step, name)) for name, words, colour in KINDS]
    legend = [
        (part.colour, f"{part.name} {scales.duration(part.value)}")
        for part in parts
        if part.value > 0
    ]
    said: list[Html] = [element("p", str(found).splitlines()[-1], class_="plain")]
    if found.findings:
        said = [
            element(
                "li",
                element("b", "CPU" if finding.cause == "cpu" else finding.cause),
                element("p", f"{finding.text[0].upper()}{finding.text[1:].removesuffix('.')}."),
                element("p", f"What would help: {finding.advice}.", class_="advice"),
                element("p", f"Expected: {found.expected(finding)}.", class_="note"),
            )
            for finding in found.findings
        ]
        said = [element("ol", *said, class_="findings")]
    return section(
        "verdict",
        "Verdict",
        *said,
        element(
            "p",
            f"Where the {scales.duration(step.seconds)} of a step go: median of "
            f"{found.ranks:,} ranks, {found.steps:,} steps.",
            class_="lead",
        ),
        bar(parts, sum(part.value for part in parts), scales.duration, tall=True),
        key(legend),
    )


def failures(view: View) -> Section | None:
    """All launches, if one of them failed, each with its whole error."""
    run = view.run
    if not any(attempt.error for attempt in run.attempts):
        return None
    codes: dict[str, list[int]] = {}
    for info in run.ranks:
        if info.exit_code:
            codes.setdefault(f"exit code {info.exit_code}", []).append(info.rank)
    ends = "; ".join(f"{ranks_text(ranks)}: {code}" for code, ranks in codes.items())
    return section(
        "failures",
        "Failures",
        *(_attempt(view, attempt) for attempt in run.attempts),
        element(
            "p",
            f"{run.attempts_cut:,} launches between the first and the latest are left out.",
        )
        if run.attempts_cut
        else None,
        element("p", f"Processes of the last launch: {ends}.", class_="note") if ends else None,
    )


def _attempt(view: View, attempt: Attempt) -> Html:
    last = attempt is view.run.attempts[-1]
    how = "failed" if attempt.error else view.status if last else "ended"
    if attempt.error and last and view.status == "cancelled":
        how = "cancelled"
    ended = view.end if attempt.ended is None else attempt.ended
    began = (
        ""
        if attempt.resumed_from is None
        else f", from the checkpoint of step {attempt.resumed_from:,}"
    )
    title = (
        f"Attempt {attempt.number} {how} after {scales.duration(ended - attempt.started)}{began}"
    )
    text = attempt.details or attempt.error
    if attempt.details == DETAILS_LEFT_OUT:
        text = f"{attempt.error}\n\n{DETAILS_LEFT_OUT}"
    text = without_password(text)
    return element(
        "div", element("h3", title), element("pre", text, tabindex="0") if text else None
    )


def checkpoints(view: View) -> Section | None:
    """The checkpoints, the latest last."""
    found = view.run.checkpoints
    if not found:
        return None
    rows = [
        [
            f"{each.step:,}",
            ", ".join(f"{name} {scales.number(value)}" for name, value in each.metrics.items()),
            scales.size(each.size),
            scales.clock_time(each.saved_at),
            f"{each.attempt}",
            f"{without_password(each.path)}{'' if _exists(each.path) else ' (removed)'}",
        ]
        for each in found
    ]
    heads = ["step", "metrics", "size", "saved", "attempt", "file"]
    return section("checkpoints", "Checkpoints", table(heads, rows, "r-rnr-"))


def _exists(path: str) -> bool:
    """Whether a file of this machine exists; other files are believed to."""
    try:
        return not path.startswith("/") or Path(path).exists()
    except OSError:
        return True


def software(view: View) -> Section | None:
    """The versions of packages on the driver."""
    versions = view.run.software
    if not versions:
        return None
    return section("software", "Software", _pairs(sorted(versions.items()), "pairs"))


def parameters(view: View) -> Section | None:
    """The arguments of ``main`` that are numbers and short texts."""
    params = dict(_shown(view.run.params.items()))
    if not params:
        return None
    return section("parameters", "Parameters", _pairs(params.items(), "pairs"))


def _shown(params: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Html | str]]:
    for name, value in params:
        yield name, str(without_secret(name, value))
