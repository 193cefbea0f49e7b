"""Says why a run is slow, and where a step's time goes: ``runner.last_run.diagnose()``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from horovod_runner.common.text import milliseconds, rate_text
from horovod_runner.results.slowness.case import FEW_STEPS, Case, Finding, Step
from horovod_runner.results.slowness.causes import RULES
from horovod_runner.results.slowness.profile import RunProfile

__all__ = ["Diagnosis", "Finding", "Step", "diagnose"]

_MOST_GAIN: Final = 100  # times as fast; a bound above that says nothing
_WEIGHT_OF_CORES: Final = 0.8  # against other findings


@dataclass(frozen=True)
class Diagnosis:
    """Why a run is slow, or that nothing stands out. ``print`` it.

    Attributes:
        ranks: the number of ranks that were measured.
        steps: the number of steps of a rank, without those of the warm-up.
        step: where a step's time goes, in the median over the ranks; None without steps.
        findings: what costs time, the most first.
    """

    ranks: int
    steps: int
    step: Step | None
    findings: list[Finding] = field(default_factory=list)

    def expected(self, finding: Finding) -> str:
        """The upper bound of what a remedy brings: "19.4 -> 435 steps/s at most"."""
        if finding.cause == "warm-up":
            return f"{finding.seconds:.3g} s less in all, at most"
        if self.step is None or not self.step.seconds:
            return "unknown"
        seconds = self.step.seconds
        most = 1 / max(seconds - finding.seconds, seconds / _MOST_GAIN)
        return f"{rate_text(1 / seconds)} -> {rate_text(most)} steps/s at most"

    def __str__(self) -> str:
        return "\n".join(_text(self))


def diagnose(profile: RunProfile) -> Diagnosis:
    """Find what makes a run slow."""
    case = Case.of(profile)
    if case is None:
        return Diagnosis(len(profile.totals), 0, None)
    findings: list[Finding] = []
    if case.count >= FEW_STEPS:
        for rule in RULES:
            findings += rule(case, findings)
    findings.sort(key=lambda finding: -_share(finding, case))
    return Diagnosis(len(case.totals), case.count, case.typical, findings)


def _share(finding: Finding, case: Case) -> float:
    """What a cause costs, of a step or of the run."""
    if finding.cause != "warm-up":
        # What takes the cores may be what another finding names.
        weight = _WEIGHT_OF_CORES if (finding.cause, finding.reason) == ("cpu", "others") else 1.0
        return weight * finding.seconds / case.typical.seconds
    steps = median(total.seconds for total in case.totals.values())
    return finding.seconds / (case.profile.warm_up.seconds + steps)


def _text(diagnosis: Diagnosis) -> Iterator[str]:
    step = diagnosis.step
    if step is None:
        yield (
            "No steps were seen: neither a step of a torch optimizer, nor a batch of a feed or a "
            "DataLoader, nor a report, nor a reduction. report(step=...) after each step shows "
            "them."
        )
        return
    rate = 1 / step.seconds
    yield (
        f"{diagnosis.ranks} rank{'s' * (diagnosis.ranks > 1)}, {diagnosis.steps:,} steps, "
        f"{rate_text(rate)} steps/s. Where a step's {milliseconds(step.seconds)} go "
        f"({'mean of the two ranks' if diagnosis.ranks == 2 else 'median rank'}):"
    )
    parts = [
        f"compute {milliseconds(step.compute)}",
        f"wait for data {milliseconds(step.data)}",
        f"wait for the slowest rank {milliseconds(step.waiting)}",
        f"reduce {milliseconds(step.moving)}",
        f"report, checkpoint {milliseconds(step.report + step.checkpoint)}",
    ]
    yield f"  {' | '.join(parts)}"
    if diagnosis.steps < FEW_STEPS:
        yield f"Too few steps to say more: at least {FEW_STEPS} are needed after the first second."
        return
    if not diagnosis.findings:
        yield "Nothing stands out."
    for finding in diagnosis.findings:
        yield f"{finding.sentence}."
        yield f"  -> {finding.advice}. Expected: {diagnosis.expected(finding)}."
