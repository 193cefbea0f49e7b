"""Says why a run is slow: ``runner.last_run.diagnose()``.

It compares where the ranks' time went, names what costs most, and says what would help. Each rule
below finds one cause. A rule that finds nothing says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from horovod_runner.common.text import ranks_text
from horovod_runner.results.profile import RankTotals, RunProfile

_LIBRARY: Final = re.compile(r"[/\\](site-packages|dist-packages|python3\.\d+)[/\\]|^<frozen ")
_FEW_STEPS: Final = 20
# Shares of a step from which a cause is named.
_DATA: Final = 0.15
_SLOWEST: Final = 0.05
_MOVING: Final = 0.25
_OWN_CALLS: Final = 0.05
_LATE: Final = 0.25  # of the time, for the sampling thread
_STARVED: Final = 0.15  # of the time, for the main thread
_HALF: Final = 0.5
_OFTEN: Final = 0.6  # of the compared collectives
_SMALL_STEP: Final = 0.002  # seconds


@dataclass(frozen=True)
class Finding:
    """One cause of slowness.

    Attributes:
        cause: "data", "slow rank", "communication", "small steps", "report", "checkpoint", "cpu" or
            "interpreter lock".
        rank: the rank that has it; None if all have.
        seconds: what it costs in each step.
        text: what was seen, with numbers.
        advice: what to change.
    """

    cause: str
    rank: int | None
    seconds: float
    text: str
    advice: str


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step of one rank go.

    Attributes:
        seconds: of the step.
        data: waiting for a batch.
        waiting: for the slowest rank, before a collective begins.
        moving: in collectives that go on.
        report, checkpoint: in these calls.
    """

    seconds: float
    data: float
    waiting: float
    moving: float
    report: float
    checkpoint: float

    @property
    def compute(self) -> float:
        """The rest."""
        known = self.data + self.waiting + self.moving + self.report + self.checkpoint
        return max(0.0, self.seconds - known)


@dataclass(frozen=True)
class Diagnosis:
    """Why a run is slow, or that nothing stands out. ``print`` it.

    Attributes:
        ranks: the number of ranks that were measured.
        steps: the number of steps of a rank.
        step: where a step's time goes, in the median over the ranks; None without steps.
        findings: what costs time, the most first.
    """

    ranks: int
    steps: int
    step: Step | None
    findings: list[Finding] = field(default_factory=list)

    def expected(self, finding: Finding) -> str:
        """The upper bound of what a remedy brings: "19.4 -> 435 steps/s at most"."""
        if self.step is None or not self.step.seconds:
            return "unknown"
        seconds = self.step.seconds
        most = 1 / max(seconds - finding.seconds, seconds / 100)
        return f"{1 / seconds:.3g} -> {most:.3g} steps/s at most"

    def __str__(self) -> str:
        return "\n".join(_text(self))


def diagnose(profile: RunProfile) -> Diagnosis:
    """Find what makes a run slow."""
    totals = {rank: total for rank, total in profile.totals.items() if total.step_count}
    if not totals:
        return Diagnosis(len(profile.totals), 0, None)
    steps = {rank: step_of(total) for rank, total in totals.items()}
    typical = Step(
        *(median(getattr(step, name) for step in steps.values()) for name in Step.__annotations__)
    )
    count = round(median(total.step_count for total in totals.values()))
    found = Diagnosis(len(totals), count, typical)
    if count < _FEW_STEPS:
        return found
    case = _Case(profile, totals, steps, typical)
    for rule in _RULES:
        found.findings.extend(rule(case))
    found.findings.sort(key=lambda finding: -finding.seconds)
    return found


def step_of(total: RankTotals) -> Step:
    """Where a step of a rank goes on average."""
    count = total.step_count
    spent = total.spent
    names = ("data", "waiting", "moving", "report", "checkpoint")
    return Step(total.seconds / count, *(spent.get(name, 0.0) / count for name in names))


@dataclass(frozen=True)
class _Case:
    """What the rules look at."""

    profile: RunProfile
    totals: Mapping[int, RankTotals]
    steps: Mapping[int, Step]
    typical: Step

    def others(self, rank: int, name: str) -> float:
        """The median of a part of a step over the other ranks."""
        rest = [getattr(step, name) for other, step in self.steps.items() if other != rank]
        return median(rest) if rest else 0.0


def _slow_rank(case: _Case) -> Iterator[Finding]:
    compared = case.profile.compared
    if compared < _FEW_STEPS or len(case.totals) < 2:
        return
    rank = max(case.totals, key=lambda rank: case.totals[rank].last)
    total = case.totals[rank]
    share, lateness = total.last / compared, total.lateness / max(1, total.last)
    cost = case.others(rank, "waiting")
    if share < _OFTEN or cost < _SLOWEST * case.typical.seconds:
        return
    text = (
        f"rank {rank} is last in {share:.0%} of the collectives, {_ms(lateness)} after the median "
        f"rank; the others wait {_ms(cost)} in a step. "
    )
    where, advice = _why_slow(case, rank)
    yield Finding("slow rank", rank, cost, f"{text}{where}.", advice)


def _why_slow(case: _Case, rank: int) -> tuple[str, str]:
    """What a slow rank does longer than the others, and what to change."""
    step = case.steps[rank]
    excess = {
        name: getattr(step, name) - case.others(rank, name)
        for name in ("compute", "data", "report", "checkpoint")
    }
    what = max(excess, key=lambda name: excess[name])
    mine, theirs = _ms(getattr(step, what)), _ms(case.others(rank, what))
    if what == "data":
        return (
            f"It waits {mine} for its batch, the others {theirs}",
            "look at what its batches cost; give its host more cores, or cache what is decoded",
        )
    if what == "report":
        return f"It spends {mine} in report(), the others {theirs}", "report less often"
    if what == "checkpoint":
        return (
            f"It spends {mine} in save_checkpoint(), the others {theirs}",
            "save less often, or smaller states",
        )
    where = f"It computes {mine} in a step, the others {theirs}"
    starved = _starved(case.totals[rank])
    if starved * step.seconds > _HALF * excess["compute"]:
        throttled = _throttled(case.profile, rank)
        why = f", and its main thread has no core for {starved:.0%} of the time"
        if throttled > _SLOWEST:
            why += f": its container's CPU quota stops it for {throttled:.0%}"
            return where + why, "raise the CPU limit of its container"
        return where + why, "fewer processes or threads on its host, or more cores per task"
    return where + _suspect_line(case, rank), (
        "look at the lines that it is seen at more often than the others"
    )


def _starved(total: RankTotals) -> float:
    """The share of the time in which a rank's main thread could have run and had no core."""
    return total.starved / total.seconds if total.seconds else 0.0


def _throttled(profile: RunProfile, rank: int) -> float:
    """The share of the time in which a rank's container was stopped by its CPU quota."""
    records = profile.machines.get(rank, [])
    seconds = sum(record.seconds for record in records)
    return sum(record.throttled for record in records) / seconds if seconds else 0.0


def _suspect_line(case: _Case, rank: int) -> str:
    """The user's line at which a rank is seen more often than the others, in words."""
    mine = user_lines(case.profile, rank)
    others = [user_lines(case.profile, other) for other in case.totals if other != rank]
    if not mine or not others:
        return ""
    more = {
        line: share - median(lines.get(line, 0.0) for lines in others)
        for line, share in mine.items()
    }
    line = max(more, key=lambda line: more[line])
    return f", {more[line]:.0%} more of its time in {line}" if more[line] > _SLOWEST else ""


def _data(case: _Case) -> Iterator[Finding]:
    seconds = case.typical.data
    if seconds < _DATA * case.typical.seconds:
        return
    stages: dict[str, float] = {}
    for total in case.totals.values():
        for name, spent in total.behind.items():
            stages[name] = stages.get(name, 0.0) + spent
    stage = max(stages, key=lambda name: stages[name], default="")
    of = f", most of it in the stage {stage}" if stage else ""
    yield Finding(
        "data",
        None,
        seconds,
        f"the ranks wait {_ms(seconds)} for each batch{of}",
        "images(..., cache=True) if images are decoded, a larger prefetch, or more cores per task",
    )


def _communication(case: _Case) -> Iterator[Finding]:
    seconds = case.typical.moving
    if seconds < _MOVING * case.typical.seconds:
        return
    total = next(iter(case.totals.values()))
    megabytes = total.bytes / total.step_count / 1e6
    if case.typical.seconds < _SMALL_STEP:
        yield Finding(
            "small steps",
            None,
            seconds,
            f"a step takes {_ms(case.typical.seconds)}, of which {_ms(seconds)} are collectives",
            "larger batches or fewer ranks: this training is too small to be distributed",
        )
        return
    rate = total.bytes / total.moved / 1e6 if total.moved else 0.0
    yield Finding(
        "communication",
        None,
        seconds,
        f"{megabytes:.1f} MB a step are reduced at {rate:,.0f} MB/s",
        "larger batches or backward_passes_per_step, compression=hvd.Compression.fp16, or a faster "
        "link between the hosts",
    )


def _own_calls(case: _Case) -> Iterator[Finding]:
    for name, call in (("report", "report()"), ("checkpoint", "save_checkpoint()")):
        seconds = max(getattr(step, name) for step in case.steps.values())
        if seconds >= _OWN_CALLS * case.typical.seconds:
            ranks = [rank for rank, step in case.steps.items() if getattr(step, name) == seconds]
            yield Finding(
                name,
                ranks[0],
                seconds,
                f"{call} takes {_ms(seconds)} of a step on {ranks_text(ranks)}",
                "call it less often",
            )


def _cpu(case: _Case) -> Iterator[Finding]:
    """Main threads that wait for a core, or for Python's interpreter lock."""
    shares = {rank: _starved(total) for rank, total in case.totals.items()}
    starved = [rank for rank, share in shares.items() if share > _STARVED]
    if starved:
        worst = max(starved, key=lambda rank: shares[rank])
        throttled = _throttled(case.profile, worst)
        why = "too many threads or processes share the cores"
        advice = "fewer ranks or threads (OMP_NUM_THREADS) on a host, or more cores per task"
        if throttled > _SLOWEST:
            why = f"the container's CPU quota stops it for {throttled:.0%} of the time"
            advice = "raise the CPU limit of the container"
        yield Finding(
            "cpu",
            None if len(starved) == len(case.totals) else worst,
            case.steps[worst].seconds * shares[worst],
            f"the main thread of {ranks_text(starved)} has no core for up to {shares[worst]:.0%} "
            f"of the time: {why}",
            advice,
        )
        return
    late = {rank: total.late / total.seconds - shares[rank] for rank, total in case.totals.items()}
    held = [rank for rank, share in late.items() if share > _LATE]
    if held:
        worst = max(held, key=lambda rank: late[rank])
        yield Finding(
            "interpreter lock",
            None if len(held) == len(case.totals) else worst,
            case.steps[worst].compute * late[worst],
            f"threads of {ranks_text(held)} wait for Python's interpreter lock, for up to "
            f"{late[worst]:.0%} of the time",
            "move the work of other threads into processes, or into calls that release the lock",
        )


_RULES: Final[tuple[Callable[[_Case], Iterator[Finding]], ...]] = (
    _slow_rank,
    _data,
    _communication,
    _own_calls,
    _cpu,
)


def user_lines(profile: RunProfile, rank: int) -> dict[str, float]:
    """By line of the user's own code, the share of looks at which a rank was in it, most first.

    A line counts with what it calls in libraries.
    """
    shares: dict[str, float] = {}
    for stack, share in profile.lines(rank):
        users = [
            call for call in stack if not _LIBRARY.search(call) and "horovod_runner" not in call
        ]
        if users:
            shares[users[-1]] = shares.get(users[-1], 0.0) + share
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _text(found: Diagnosis) -> Iterator[str]:
    step = found.step
    if step is None:
        yield (
            "No steps were seen: neither a step of a torch optimizer, nor a batch of a feed, nor a "
            "report, nor a reduction. report(step=...) once a step makes them known."
        )
        return
    rate = 1 / step.seconds
    yield (
        f"{found.ranks} rank{'s' * (found.ranks > 1)}, {found.steps:,} steps, {rate:.3g} steps/s. "
        f"Where a step's {_ms(step.seconds)} go (median rank):"
    )
    parts = [
        f"compute {_ms(step.compute)}",
        f"wait for data {_ms(step.data)}",
        f"wait for the slowest rank {_ms(step.waiting)}",
        f"reduce {_ms(step.moving)}",
        f"report, checkpoint {_ms(step.report + step.checkpoint)}",
    ]
    yield f"  {' | '.join(parts)}"
    if found.steps < _FEW_STEPS:
        yield f"Too few steps to say more: at least {_FEW_STEPS} are needed."
        return
    if not found.findings:
        yield "Nothing stands out."
    for finding in found.findings:
        yield f"{finding.text[0].upper()}{finding.text[1:].removesuffix('.')}."
        yield f"  -> {finding.advice}. Expected: {found.expected(finding)}."


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return "0 ms" if milliseconds < 0.01 else f"{milliseconds:.3g} ms"
