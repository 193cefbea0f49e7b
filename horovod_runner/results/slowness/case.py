"""What the rules that look for causes see of a run, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Final, TypeAlias

from horovod_runner.results.slowness.profile import RunProfile
from horovod_runner.results.slowness.totals import SPENT, RankTotals
from horovod_runner.wire.measurements import Machine

FEW_STEPS: Final = 20
#: Of the time, from which a main thread without a core is named; and a container with a quota.
STARVED: Final = 0.15
THROTTLED: Final = 0.05
#: Of the time, from which a feed's threads never pause.
BUSY_FEED: Final = 0.9
#: This package's calls in a step, and what to change about them.
CALLS: Final = {
    "report": ("report()", "report less often, or fewer metrics"),
    "checkpoint": ("save_checkpoint() or commit()", "save less often, or a smaller state"),
}


@dataclass(frozen=True)
class Finding:
    """One cause of slowness.

    Attributes:
        cause: "slow rank", "slow host", "uneven steps", "data", "communication", "small steps",
            "report", "checkpoint", "cpu", "interpreter lock", "memory" or "warm-up".
        rank: the rank that has it; None if several have.
        seconds: what it costs in each step; of "warm-up", in all.
        text: what was seen, with numbers.
        advice: what to change.
        reason: what is behind it, where that can be told: of a slow rank "compute", "data",
            "report", "checkpoint", "batches" (larger ones), "cpu" or "quota"; of "cpu" "quota",
            "threads" or "others".
    """

    cause: str
    rank: int | None
    seconds: float
    text: str
    advice: str
    reason: str = ""

    @property
    def sentence(self) -> str:
        """What was seen, as a sentence without its full stop."""
        return f"{self.text[0].upper()}{self.text[1:].removesuffix('.')}"


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
class Case:
    """What the rules look at.

    Attributes:
        totals: of the ranks with steps.
        steps: where a step of each of these ranks goes.
        typical: the same in the median over the ranks.
    """

    profile: RunProfile
    totals: Mapping[int, RankTotals]
    steps: Mapping[int, Step]
    typical: Step
    count: int
    machines: Mapping[int, Sequence[Machine]]

    @classmethod
    def of(cls, profile: RunProfile) -> Case | None:
        """The case of a run; None if no steps were seen."""
        totals = {rank: total for rank, total in profile.totals.items() if total.step_count}
        if not totals:
            return None
        steps = {rank: step_of(total, profile.compared) for rank, total in totals.items()}
        typical = Step(*map(median, zip(*map(astuple, steps.values()), strict=True)))
        count = round(median(total.step_count for total in totals.values()))
        return cls(profile, totals, steps, typical, count, profile.machines)

    def others(self, rank: int, name: str) -> float:
        """The median of a part of a step over the other ranks."""
        rest = [getattr(step, name) for other, step in self.steps.items() if other != rank]
        return median(rest) if rest else 0.0

    def starved(self, rank: int) -> float:
        """The share of the time in which a rank's main thread could have run and had no core."""
        total = self.totals[rank]
        return total.starved / total.seconds if total.seconds else 0.0

    def feed_works(self, rank: int) -> float:
        """The share of the time in which a rank's feed makes batches, over all its threads.

        Of a feed in a framework's graph the idle time is known, and the rest counts.
        """
        total = self.totals[rank]
        idle = total.stages.get("idle")
        works = sum(total.stages.values()) if idle is None else total.seconds - idle
        return works / total.seconds if total.seconds else 0.0

    def machine(self, rank: int, name: str) -> float:
        """A counter of a rank's host, per second."""
        records = self.machines.get(rank, [])
        seconds = sum(record.seconds for record in records)
        return sum(getattr(record, name) for record in records) / seconds if seconds else 0.0

    def mean(self, rank: int, name: str) -> float:
        """A state of a rank's host, on average."""
        records = self.machines.get(rank, [])
        return sum(getattr(r, name) for r in records) / len(records) if records else 0.0

    def cells(self, rank: int) -> float:
        """Numbers in a batch of a rank."""
        total = self.totals[rank]
        return total.cells / max(1, total.steps.get("batches", 0))

    def named(self, rank: int) -> str:
        """A rank in words, with its host if there are several."""
        hosts = self.profile.hosts
        if len(set(hosts.values())) < 2 or rank not in hosts:
            return f"rank {rank}"
        return f"rank {rank} (host {hosts[rank]})"


def step_of(total: RankTotals, compared: int) -> Step:
    """Where a step of a rank goes on average."""
    count = total.step_count
    spent = dict(total.spent)
    blocked = spent.get("blocked", 0.0)
    if blocked and compared:
        # Each step waits about as long as one of its collectives.
        waiting = min(blocked, count * total.waited_in_compared / compared)
        spent["waiting"], spent["moving"] = waiting, blocked - waiting
    return Step(total.seconds / count, *(spent.get(name, 0.0) / count for name in SPENT))


#: A function of the case and of what the rules before it have found.
Rule: TypeAlias = Callable[[Case, Sequence[Finding]], Iterator[Finding]]


def stage_text(totals: Sequence[RankTotals]) -> str:
    """What most of the time of a feed goes into, in words."""
    stages: dict[str, float] = {}
    for total in totals:
        for name, seconds in total.stages.items():
            if name != "idle":
                stages[name] = stages.get(name, 0.0) + seconds
    if not stages:
        return ""
    stage = max(stages, key=lambda name: stages[name])
    share = stages[stage] / sum(total.seconds for total in totals)
    what, _, column = stage.partition(" ")
    named = f'decoding column "{column}"' if what == "decode" else f"the stage {stage}"
    return f"; most of it is {named}, {share:.0%} of one core"
