"""Shows results: as lines in a terminal, as JSON, and as a page of one HTML file."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from horovod_runner import __version__
from horovod_runner.results.page import numbers
from horovod_runner.results.page.templates import render, write
from horovod_runner.tools.verify.check import VerifyReading
from horovod_runner.tools.verify.machine import ThisMachine
from horovod_runner.tools.verify.session import CheckResult, Status

_STATUSES: Final[Sequence[Status]] = ("failed", "passed", "skipped")
_VERDICTS: Final = {True: "as expected", False: "not as expected", None: "shown only"}
_MARKS: Final = {True: "ok", False: "WRONG", None: "-"}
_NARROWEST: Final = 60
_INDENT: Final = " " * 9


class VerifyReport(msgspec.Struct, frozen=True):
    """All results of one call of `horovod-runner verify`; fewer if it was interrupted."""

    machine: ThisMachine
    results: tuple[CheckResult, ...]
    began: float
    seconds: float
    quick: bool
    version: str = __version__

    @property
    def failed(self) -> bool:
        """Whether a check has failed."""
        return any(result.status == "failed" for result in self.results)


def as_json(report: VerifyReport) -> str:
    """The report as JSON, with the key "ok"."""
    plain = {"ok": not report.failed, **msgspec.to_builtins(report)}
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def machine_text(machine: ThisMachine) -> str:
    """A machine in a line."""
    models = Counter(gpu.name or "unknown GPU" for gpu in machine.gpus)
    gpus = ", ".join(f"{count} x {name}" for name, count in models.items()) or "no GPU"
    frameworks = [
        f"{each.name} {each.version} ({each.kind})" for each in machine.frameworks if not each.error
    ]
    return "; ".join([f"{machine.host}: {gpus}, {machine.cores} cores", *frameworks])


def summary(report: VerifyReport) -> str:
    """How many checks passed, failed and were skipped, and the time they took."""
    counts = Counter(result.status for result in report.results)
    parts = [f"{counts[status]} {status}" for status in _STATUSES if counts[status]]
    return f"{', '.join(parts) or 'nothing checked'} in {numbers.duration(report.seconds)}"


def lines(result: CheckResult, width: int) -> list[str]:
    """A result for a terminal."""
    width = max(width, _NARROWEST)
    took = f"  ({numbers.duration(result.seconds)})" if result.status != "skipped" else ""
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


def _reading_lines(reading: VerifyReading, width: int) -> list[str]:
    text = f"{reading.name}: {reading.seen}"
    if reading.expected and (not reading.ok or reading.seen != reading.expected):
        text += f" [expected: {reading.expected}]"
    start = f"{_INDENT}{_MARKS[reading.ok]:<6}"
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start))


def write_page(report: VerifyReport, path: Path) -> None:
    """Write the report as HTML that loads nothing from elsewhere, to a file for this user alone."""
    machine = report.machine
    facts = [("began", numbers.clock_time(report.began)), ("cores", f"{machine.cores}")]
    facts += [("NCCL", machine.nccl)] if machine.nccl else []
    facts += [(f"GPU {gpu.device}", gpu.name or "unknown") for gpu in machine.gpus]
    for each in machine.frameworks:
        facts.append((each.name, f"{each.version}, {each.kind}"))
        if each.horovod is not None and not each.horovod.error:
            planes = ", ".join(each.horovod.built)
            facts.append((f"Horovod for {each.name}", f"{each.horovod.version}, {planes}"))
    page = render(
        "horovod_runner.tools.verify",
        "page.html",
        report=report,
        verdict="failed" if report.failed else "passed",
        facts=facts,
        summary=summary(report),
        shown=sorted(
            (result for result in report.results if result.status != "skipped"),
            key=lambda result: _STATUSES.index(result.status),
        ),
        skipped=[result for result in report.results if result.status == "skipped"],
        verdicts=_VERDICTS,
        kinds={True: "passed", False: "failed", None: "skipped"},
    )
    write(page, path)
