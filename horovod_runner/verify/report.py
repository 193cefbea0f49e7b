"""Shows results: as lines in a terminal, as JSON, and as a page of one HTML file."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from horovod_runner import __version__
from horovod_runner.results.page import scales
from horovod_runner.results.page.markup import (
    Html,
    document,
    element,
    join,
    resource,
    write,
)
from horovod_runner.verify.check import Reading
from horovod_runner.verify.machine import Machine
from horovod_runner.verify.session import Result, Status

_STATUSES: Final[Sequence[Status]] = ("failed", "passed", "skipped")
_VERDICTS: Final = {True: "as expected", False: "not as expected", None: "shown only"}
_MARKS: Final = {True: "ok", False: "WRONG", None: "-"}
_NARROWEST: Final = 60
_INDENT: Final = " " * 9


class Report(msgspec.Struct, frozen=True):
    """All results of one call of `horovod-runner verify`.

    Attributes:
        machine: what the checks used of the machine.
        results: in the order of the checks; fewer than were asked for if it was interrupted.
        began: in seconds since the epoch.
        seconds: how long all took.
        quick: whether sizes were tiny.
        version: of this package.
    """

    machine: Machine
    results: tuple[Result, ...]
    began: float
    seconds: float
    quick: bool
    version: str = __version__

    @property
    def failed(self) -> bool:
        """Whether a check has failed."""
        return any(result.status == "failed" for result in self.results)


def as_json(report: Report) -> str:
    """The report as JSON, with the key "ok"."""
    plain = {"ok": not report.failed, **msgspec.to_builtins(report)}
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def machine_text(machine: Machine) -> str:
    """A machine in a line."""
    models = Counter(gpu.name or "unknown GPU" for gpu in machine.gpus)
    gpus = ", ".join(f"{count} x {name}" for name, count in models.items()) or "no GPU"
    frameworks = [
        f"{each.name} {each.version} ({f'CUDA {each.cuda}' if each.cuda else 'CPU build'})"
        for each in machine.frameworks
        if not each.error
    ]
    return "; ".join([f"{machine.host}: {gpus}, {machine.cores} cores", *frameworks])


def summary(report: Report) -> str:
    """How many checks passed, failed and were skipped, and the time they took."""
    counts = Counter(result.status for result in report.results)
    parts = [f"{counts[status]} {status}" for status in _STATUSES if counts[status]]
    return f"{', '.join(parts) or 'nothing checked'} in {scales.duration(report.seconds)}"


def lines(result: Result, width: int) -> list[str]:
    """A result for a terminal.

    Args:
        result: of one check.
        width: of the terminal.
    """
    width = max(width, _NARROWEST)
    took = f"  ({scales.duration(result.seconds)})" if result.status != "skipped" else ""
    found = textwrap.wrap(
        f"{result.status:<8} {result.name}{took}: {result.claim}",
        width,
        subsequent_indent=_INDENT,
    )
    if result.reason:
        why = f"{'why' if result.status == 'skipped' else 'reason'}: {result.reason}"
        found += textwrap.wrap(
            why.splitlines()[0], width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    for reading in result.readings:
        found += _reading_lines(reading, width)
    return found


def _reading_lines(reading: Reading, width: int) -> list[str]:
    text = f"{reading.name}: {reading.seen}"
    if reading.expected and (not reading.ok or reading.seen != reading.expected):
        text += f" [expected: {reading.expected}]"
    start = f"{_INDENT}{_MARKS[reading.ok]:<6}"
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start))


def write_page(report: Report, path: Path) -> None:
    """Write the page to a file that only this user can read.

    Raises:
        OSError: the file cannot be written.
    """
    write(page(report), path)


def page(report: Report) -> str:
    """The report as HTML that loads nothing from elsewhere."""
    verdict = "failed" if report.failed else "passed"
    title = f"{report.machine.host}: verification {verdict}"
    shown = [
        result
        for status in ("failed", "passed")
        for result in report.results
        if result.status == status
    ]
    skipped = [result for result in report.results if result.status == "skipped"]
    main = join(
        [
            _header(report, verdict),
            element("ol", *map(_entry, report.results), class_="checks"),
            *map(_section, shown),
            _skipped(skipped) if skipped else None,
            element("footer", f"Written by horovod_runner {report.version}."),
        ]
    )
    return document(title, main, style=resource("horovod_runner.verify", "page.css"))


def _header(report: Report, verdict: str) -> Html:
    machine = report.machine
    facts = [("began", scales.clock_time(report.began)), ("cores", f"{machine.cores}")]
    if machine.nccl:
        facts.append(("NCCL", machine.nccl))
    facts += [(f"GPU {gpu.device}", gpu.name or "unknown") for gpu in machine.gpus]
    for each in machine.frameworks:
        kind = f"CUDA {each.cuda}" if each.cuda else "CPU build"
        facts.append((each.name, f"{each.version}, {kind}"))
        if each.horovod is not None and not each.horovod.error:
            planes = ", ".join(each.horovod.built)
            facts.append((f"Horovod for {each.name}", f"{each.horovod.version}, {planes}"))
    quick = "Tiny sizes (--quick): speeds are shown, and not judged. " if report.quick else ""
    cpus = (
        "" if machine.gpus else "No GPU was used: what needs one is skipped, the rest ran on CPUs. "
    )
    return element(
        "header",
        element(
            "h1",
            element("span", "Verification of "),
            element("span", machine.host or "this machine"),
            element("span", verdict, class_=f"status {verdict}"),
        ),
        element("p", f"{cpus}{quick}{summary(report)}.", class_="remark"),
        element(
            "dl",
            *(element("div", element("dt", name), element("dd", value)) for name, value in facts),
            class_="facts",
        ),
    )


def _entry(result: Result) -> Html:
    took = scales.duration(result.seconds) if result.status != "skipped" else ""
    to = result.name if result.status != "skipped" else "skipped"
    return element(
        "li",
        element("span", result.status, class_=f"mark {result.status}"),
        element("a", result.name, href=f"#{to}"),
        element("span", result.claim, class_="claim"),
        element("span", took, class_="took"),
    )


def _section(result: Result) -> Html:
    return element(
        "section",
        element(
            "h2",
            element("span", result.name),
            element("span", result.status, class_=f"status {result.status}"),
        ),
        element("p", result.claim, class_="plain"),
        element("p", f"docs/{result.page}", class_="note"),
        element("pre", result.reason, class_="error", tabindex="0") if result.reason else None,
        _readings(result.readings) if result.readings else None,
        element(
            "details",
            element("summary", "The last lines that it printed"),
            element("pre", result.output, tabindex="0"),
        )
        if result.output
        else None,
        id=result.name,
    )


def _readings(readings: Iterable[Reading]) -> Html:
    rows = []
    for reading in readings:
        kind = {True: "passed", False: "failed", None: "skipped"}[reading.ok]
        rows.append(
            element(
                "tr",
                element("td", reading.name, class_="what"),
                element("td", reading.seen, data_label="seen"),
                element("td", reading.expected or "-", data_label="expected"),
                element("td", _VERDICTS[reading.ok], class_=f"mark {kind}"),
            )
        )
    names = ("", "seen", "expected", "")
    head = element("tr", *(element("th", name or None, scope="col") for name in names))
    return element("table", element("thead", head), element("tbody", *rows), class_="readings")


def _skipped(results: Iterable[Result]) -> Html:
    items = [
        element("div", element("dt", result.name), element("dd", result.reason))
        for result in results
    ]
    return element(
        "section",
        element("h2", "Skipped"),
        element("dl", *items, class_="reasons"),
        id="skipped",
    )
