"""The causes of slowness that can be told apart. Each rule finds one, or says nothing.

A rule is a function of a run's profile, as a :class:`Case`, and of what the rules before it have
found. Shares below are of a step, or of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from horovod_runner.common.text import milliseconds as ms
from horovod_runner.common.text import ranks_text
from horovod_runner.results.lines import busy_thread, loader_line, more_often, waiting_line
from horovod_runner.results.profile import RankTotals, RunProfile

FEW_STEPS: Final = 20
_DATA: Final = 0.15
_SLOWEST: Final = 0.05
_LEAST_WAIT: Final = 0.0003  # seconds; less is how ranks always differ
_UNEVEN: Final = 0.2
_MOVING: Final = 0.25
_OWN_CALLS: Final = 0.05
_STARVED: Final = 0.15  # of the time, for the main thread
_THROTTLED: Final = 0.05
_LATE: Final = 0.1  # of the time, for the sampling thread
_BUSY_THREAD: Final = 0.5  # of the moments in which the lock was not free
_BUSY_FEED: Final = 0.9  # of the time, for the threads of a feed
_OFTEN: Final = 0.65  # of the compared collectives
_OFTEN_HOST: Final = 0.85
_LARGER: Final = 1.2  # times as many numbers in a batch
_SMALL_STEP: Final = 0.005  # seconds
_SMALL_BYTES: Final = 1 << 20
_WARM_UP: Final = 0.3  # of the time of a run
_WARM_UP_SECONDS: Final = 3.0
_SWAPPED: Final = 4 << 20  # bytes in a second
_FAULTS: Final = 50  # pages in a second
# This package's calls in a step, and what to change about them.
_CALLS: Final = {
    "report": ("report()", "report less often, or fewer metrics"),
    "checkpoint": ("save_checkpoint()", "save less often, or a smaller state"),
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
        profile: of the run.
        totals: of the ranks with steps.
        steps: where a step of each of these ranks goes.
        typical: the same in the median over the ranks.
        count: the number of steps of a rank.
    """

    profile: RunProfile
    totals: Mapping[int, RankTotals]
    steps: Mapping[int, Step]
    typical: Step
    count: int

    @classmethod
    def of(cls, profile: RunProfile) -> Case | None:
        """The case of a run; None if no steps were seen."""
        totals = {rank: total for rank, total in profile.totals.items() if total.step_count}
        if not totals:
            return None
        steps = {rank: step_of(total, profile.compared) for rank, total in totals.items()}
        names = Step.__annotations__
        typical = Step(*(median(getattr(s, name) for s in steps.values()) for name in names))
        count = round(median(total.step_count for total in totals.values()))
        return cls(profile, totals, steps, typical, count)

    def others(self, rank: int, name: str) -> float:
        """The median of a part of a step over the other ranks."""
        rest = [getattr(step, name) for other, step in self.steps.items() if other != rank]
        return median(rest) if rest else 0.0

    def starved(self, rank: int) -> float:
        """The share of the time in which a rank's main thread could have run and had no core."""
        total = self.totals[rank]
        return total.starved / total.seconds if total.seconds else 0.0

    def machine(self, rank: int, name: str) -> float:
        """A counter of a rank's host, per second."""
        records = self.profile.machines.get(rank, [])
        seconds = sum(record.seconds for record in records)
        return sum(getattr(record, name) for record in records) / seconds if seconds else 0.0

    def mean(self, rank: int, name: str) -> float:
        """A state of a rank's host, on average."""
        records = self.profile.machines.get(rank, [])
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
    """Where a step of a rank goes on average.

    Args:
        total: what the rank has measured.
        compared: how many collectives were compared over all ranks.
    """
    count = total.step_count
    spent = dict(total.spent)
    blocked = spent.get("blocked", 0.0)
    if blocked and compared:
        # Each step waits about as long as one of its collectives.
        waiting = min(blocked, count * total.waited_in_compared / compared)
        spent["waiting"], spent["moving"] = waiting, blocked - waiting
    names = ("data", "waiting", "moving", "report", "checkpoint")
    return Step(total.seconds / count, *(spent.get(name, 0.0) / count for name in names))


Rule = Callable[[Case, Sequence[Finding]], Iterator[Finding]]


def _slow_rank(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    """One rank, or the ranks of one host, that the others wait for."""
    compared = case.profile.compared
    if compared < FEW_STEPS or len(case.totals) < 2:
        return
    rank = max(case.totals, key=lambda rank: case.totals[rank].last)
    total = case.totals[rank]
    share = total.last / compared
    cost = case.others(rank, "waiting")
    if cost < max(_LEAST_WAIT, _SLOWEST * case.typical.seconds):
        return
    if share < _OFTEN or case.steps[rank].waiting > cost / 2:
        yield from _slow_host(case)
        return
    text = (
        f"{case.named(rank)} is last in {share:.0%} of the collectives, "
        f"{ms(total.lateness / max(1, total.last))} after the median of the others, which wait "
        f"{ms(cost)} in a step. "
    )
    where, advice, reason = _why_slow(case, rank)
    yield Finding("slow rank", rank, cost, f"{text}{where}", advice, reason)


def _slow_host(case: Case) -> Iterator[Finding]:
    hosts = case.profile.hosts
    by_host: dict[str, list[int]] = {}
    for rank in case.totals:
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    if len(by_host) < 2:
        return
    last = {host: sum(case.totals[r].last for r in ranks) for host, ranks in by_host.items()}
    slow = max(last, key=lambda host: last[host])
    ranks = by_host[slow]
    rest = [rank for rank in case.totals if rank not in ranks]
    cost = median(case.steps[rank].waiting for rank in rest)
    mine = median(case.steps[rank].waiting for rank in ranks)
    share = last[slow] / case.profile.compared
    if share < _OFTEN_HOST or cost < max(2 * mine, _SLOWEST * case.typical.seconds):
        return
    compute = [median(case.steps[rank].compute for rank in group) for group in (ranks, rest)]
    yield Finding(
        "slow host",
        None,
        cost,
        f"the ranks of host {slow} ({ranks_text(ranks)}) are last in {share:.0%} of the "
        f"collectives; the others wait {ms(cost)} in a step. They compute {ms(compute[0])} in a "
        f"step, the others {ms(compute[1])}; {case.mean(ranks[0], 'cores'):.1f} of "
        f"{case.mean(ranks[0], 'of_cores'):.0f} cores of the host are busy",
        "leave this host out, or find what else runs there",
    )


def _why_slow(case: Case, rank: int) -> tuple[str, str, str]:
    """What a slow rank does longer than the others: in words, what to change, and the reason."""
    step = case.steps[rank]
    excess = {
        name: getattr(step, name) - case.others(rank, name)
        for name in ("compute", "data", "report", "checkpoint")
    }
    what = max(excess, key=lambda name: excess[name])
    mine, theirs = ms(getattr(step, what)), ms(case.others(rank, what))
    cells = case.cells(rank)
    rest = median(case.cells(other) for other in case.totals if other != rank)
    if what in ("compute", "data") and rest and cells > _LARGER * rest:
        return (
            f"Its batches are {cells / rest:.1f} times as large as those of the others "
            f"({cells:,.0f} numbers, not {rest:,.0f})",
            "give all ranks the same number of rows, of about the same length",
            "batches",
        )
    if what == "data":
        stage = _stage([case.totals[rank]]) or waiting_line(case.profile, rank)
        return (
            f"It waits {mine} for its batch, the others {theirs}{stage}",
            "look at what its batches cost; give its host more cores, or cache what is decoded",
            "data",
        )
    if what in _CALLS:
        call, advice = _CALLS[what]
        return f"It spends {mine} in {call}, the others {theirs}", advice, what
    return _why_computes_longer(case, rank, excess["compute"])


def _why_computes_longer(case: Case, rank: int, excess: float) -> tuple[str, str, str]:
    step = case.steps[rank]
    mine, theirs = ms(step.compute), ms(case.others(rank, "compute"))
    where = f"It computes {mine} in a step, the others {theirs}"
    starved = case.starved(rank) - median(case.starved(r) for r in case.totals if r != rank)
    throttled = case.machine(rank, "throttled")
    if throttled > _THROTTLED:
        return (
            f"{where}: its container's CPU quota stops it for {throttled:.0%} of the time",
            "raise the CPU limit of its container",
            "quota",
        )
    if starved * step.seconds > excess / 2:
        return (
            f"{where}, and its main thread has no core for {case.starved(rank):.0%} of the time",
            "fewer processes or threads on its host, or more cores per task",
            "cpu",
        )
    line = more_often(case.profile, rank, case.totals)
    return (
        f"{where}{line}",
        "look at the lines that it is seen at more often than the others: "
        f"last_run.profile.flame({rank}) draws them",
        "compute",
    )


def _uneven_steps(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks that take turns at being the last one."""
    waiting = case.typical.waiting
    if case.profile.compared < FEW_STEPS or len(case.totals) < 2:
        return
    if any(finding.cause in ("slow rank", "slow host") for finding in before):
        return
    if waiting < max(10 * _LEAST_WAIT, _UNEVEN * case.typical.seconds):
        return
    if max(map(case.starved, case.totals)) > _STARVED / 2:
        return  # ranks that have no core are late by chance
    yield Finding(
        "uneven steps",
        None,
        waiting,
        f"the ranks take turns at being the last: each waits {ms(waiting)} in a step for others",
        "batches of the same size and length on all ranks in each step; sort rows by length, or "
        "cut them",
    )


def _data(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    """All ranks wait for batches."""
    seconds = case.typical.data
    totals = list(case.totals.values())
    if seconds < _DATA * case.typical.seconds:
        yield from _data_in_graph(case)
        return
    if any(finding.reason == "data" and finding.seconds > seconds for finding in before):
        return
    rank = max(case.steps, key=lambda rank: case.steps[rank].data)
    where = _stage(totals) or loader_line(case.profile, rank) or waiting_line(case.profile, rank)
    yield Finding(
        "data",
        None,
        seconds,
        f"the ranks wait {ms(seconds)} for each batch{where}",
        _data_advice(totals),
    )


def _data_advice(totals: Sequence[RankTotals]) -> str:
    if any(name.startswith("decode") for total in totals for name in total.stages):
        return (
            "Image(..., cache=True) keeps decoded images; or more cores per task, or a smaller "
            "size of the images"
        )
    if any(total.stages for total in totals):
        return "a cheaper transform, a larger prefetch, or more cores per task"
    return (
        "more workers: DataLoader(num_workers=...), persistent_workers=True, or a cheaper dataset"
    )


def _stage(totals: Sequence[RankTotals]) -> str:
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


def _data_in_graph(case: Case) -> Iterator[Finding]:
    """A framework's graph that waits for batches: the threads of the feed never pause."""
    shares = []
    for total in case.totals.values():
        if "idle" not in total.stages or not total.seconds:
            return
        shares.append(1 - total.stages["idle"] / total.seconds)
    busy = median(shares)
    if busy < _BUSY_FEED:
        return
    totals = list(case.totals.values())
    cores = max(1.0, case.mean(min(case.totals), "of_cores"))
    computed = median(total.cpu / total.step_count for total in totals) / cores
    known = case.typical.waiting + case.typical.moving
    yield Finding(
        "data",
        None,
        max(0.0, case.typical.seconds - known - computed),
        f"the feed works for {busy:.0%} of the time, and is never ahead of the training"
        f"{_stage(totals)}",
        _data_advice(totals),
    )


def _communication(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    seconds = case.typical.moving
    if seconds < _MOVING * case.typical.seconds:
        return
    totals = case.totals.values()
    size = median(total.bytes / total.step_count for total in totals)
    if case.typical.seconds < _SMALL_STEP and size < _SMALL_BYTES:
        yield Finding(
            "small steps",
            None,
            seconds,
            f"a step takes {ms(case.typical.seconds)}, of which {ms(seconds)} are collectives of "
            f"{size / 1e3:,.0f} kB",
            "larger batches, or fewer ranks: this training is too small to be distributed",
        )
        return
    moved = median(total.moved for total in totals)
    rate = median(total.bytes for total in totals) / moved / 1e6 if moved else 0.0
    at = f" at {rate:,.0f} MB/s" if rate else ""
    network = max(case.machine(rank, "network") for rank in case.totals) / 1e6
    link = f"; a host's network carries {network:,.0f} MB/s" if network > 1 else ""
    yield Finding(
        "communication",
        None,
        seconds,
        f"{size / 1e6:.1f} MB a step are reduced{at}, which takes {ms(seconds)}{link}",
        "larger batches or backward_passes_per_step, compression=hvd.Compression.fp16, or a faster "
        "link between the hosts",
    )


def _own_calls(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    for name, (call, advice) in _CALLS.items():
        seconds = max(getattr(step, name) for step in case.steps.values())
        if seconds < _OWN_CALLS * case.typical.seconds:
            continue
        if any(finding.reason == name for finding in before):
            continue
        ranks = [rank for rank, step in case.steps.items() if getattr(step, name) > seconds / 2]
        yield Finding(
            name,
            ranks[0] if len(ranks) == 1 else None,
            seconds,
            f"{call} takes {ms(seconds)} of a step on {ranks_text(ranks)}",
            advice,
        )


def _cpu(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    """Main threads that have no core."""
    shares = {rank: case.starved(rank) for rank in case.totals}
    throttled = {rank: case.machine(rank, "throttled") for rank in case.totals}
    starved = [rank for rank in shares if shares[rank] > _STARVED or throttled[rank] > _THROTTLED]
    if not starved:
        return
    worst = max(starved, key=lambda rank: max(shares[rank], throttled[rank]))
    if any(finding.reason in ("cpu", "quota") for finding in before) and len(starved) == 1:
        return
    lost = max(shares[worst], throttled[worst])
    why, advice, reason = _why_no_core(case, worst)
    yield Finding(
        "cpu",
        worst if len(starved) == 1 < len(case.totals) else None,
        case.steps[worst].seconds * lost,
        f"the main thread of {ranks_text(starved)} has no core for up to {lost:.0%} of the time: "
        f"{why}",
        advice,
        reason,
    )


def _why_no_core(case: Case, rank: int) -> tuple[str, str, str]:
    throttled = case.machine(rank, "throttled")
    if throttled > _THROTTLED:
        why = f"the container's CPU quota stops it for {throttled:.0%} of the time"
        return why, "raise the CPU limit of the container", "quota"
    hosts = case.profile.hosts
    here = [other for other in case.totals if hosts.get(other) == hosts.get(rank)]
    cores = case.mean(rank, "of_cores") or 1.0
    threads = sum(case.totals[other].threads for other in here)
    if threads > _LARGER * cores:
        return (
            f"its host's ranks compute with {threads} threads on {cores:.0f} cores",
            "fewer threads: OMP_NUM_THREADS or torch.set_num_threads, which the runner sets to "
            "the cores of each rank, or fewer ranks",
            "threads",
        )
    ours = sum(case.totals[other].cpu / case.totals[other].seconds for other in here)
    others = max(0.0, case.mean(rank, "cores") - ours)
    return (
        f"its host's {len(here)} ranks take {ours:.1f} of {cores:.0f} cores, and other processes "
        f"{others:.1f}",
        "end the other processes, or fewer ranks on this host"
        if others > ours / 4
        else "more cores per task, or fewer ranks on this host",
        "others",
    )


def _interpreter_lock(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    """Main threads that neither run nor wait for anything known, while the lock is not free."""
    held: dict[int, float] = {}
    for rank, total in case.totals.items():
        late = total.late / total.seconds
        known = sum(total.spent.values()) + total.main_cpu + total.starved
        stopped = 1 - known / total.seconds
        busy = busy_thread(case.profile, rank)[0]
        if late > _LATE and stopped > _STARVED and busy > _BUSY_THREAD:
            held[rank] = min(stopped, 1.0)
    if not held:
        return
    worst = max(held, key=lambda rank: held[rank])
    line = busy_thread(case.profile, worst)[1]
    yield Finding(
        "interpreter lock",
        worst if len(held) == 1 < len(case.totals) else None,
        case.steps[worst].seconds * held[worst],
        f"the main thread of {ranks_text(list(held))} waits for Python's interpreter lock, for up "
        f"to {held[worst]:.0%} of the time; another thread is at {line}",
        "move the work of other threads into processes, or into calls that release the lock",
    )


def _memory(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    """Hosts that swap, or ranks whose memory comes from a disk again and again."""
    swapped = {rank: case.machine(rank, "swapped") for rank in case.totals}
    faults = {rank: case.machine(rank, "faults") for rank in case.totals}
    worst = max(case.totals, key=lambda rank: (swapped[rank], faults[rank]))
    if swapped[worst] < _SWAPPED or faults[worst] < _FAULTS:
        return
    seconds = case.typical.seconds / 2
    yield Finding(
        "memory",
        None,
        seconds,
        f"the host of {case.named(worst)} swaps {swapped[worst] / 1e6:.0f} MB/s; the rank waits "
        f"for {faults[worst]:,.0f} pages a second from the disk",
        "smaller batches, fewer ranks or DataLoader workers on a host, or more memory",
    )


def _warm_up(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    """A begin that was much slower than the rest, and a large part of the run."""
    start = case.profile.warm_up
    steps, usual = start.step_count, case.typical.seconds
    rest = median(total.seconds for total in case.totals.values())
    lost = start.seconds - steps * usual
    if lost < max(_WARM_UP_SECONDS, _WARM_UP * (start.seconds + rest)):
        return
    data = start.spent.get("data", 0.0)
    if data > start.seconds / 2:
        why = f"{data:.1f} s of it went into waiting for data{_stage([start])}"
        advice = "what is packed once is used again: by longer runs, and by runs with a data_dir"
    else:
        why = "the training compiles or warms up"
        advice = (
            "a longer run makes it matter less; keep compiled code (torch.compile's cache, XLA's), "
            "and keep shapes the same so that nothing is compiled again"
        )
    yield Finding(
        "warm-up",
        None,
        lost,
        f"the first {steps} steps took {start.seconds:.1f} s, as much as "
        f"{start.seconds / usual:,.0f} later ones: {why}",
        advice,
    )


#: Later rules see what earlier ones have found.
RULES: Final[tuple[Rule, ...]] = (
    _slow_rank,
    _uneven_steps,
    _data,
    _communication,
    _own_calls,
    _cpu,
    _interpreter_lock,
    _memory,
    _warm_up,
)
