"""Rules that find a rank or a host that the others wait for, and say why it is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from horovod_runner.common.text import count_text, ranks_text
from horovod_runner.common.text import milliseconds as ms
from horovod_runner.results.slowness.case import (
    BUSY_FEED,
    CALLS,
    FEW_STEPS,
    STARVED,
    THROTTLED,
    Case,
    Finding,
    stage_text,
)
from horovod_runner.results.slowness.lines import loader_line, more_often, waiting_line

_SLOWEST: Final = 0.05
_LEAST_WAIT: Final = 0.0003  # seconds; less is how ranks always differ
_CHANCE: Final = 0.25  # of the compute, by which ranks differ by chance
_UNEVEN: Final = 0.15
_CROWDED: Final = 0.2  # of the time, in which some thread of the host waits for a core
_NEARLY_ALWAYS: Final = 0.9  # of the collectives
_MOST_BLAME: Final = 0.7  # of the lateness of all ranks
_MOST_BLAME_OF_HOST: Final = 0.85
_LARGER: Final = 1.2  # times as many numbers in a batch
_STOLEN: Final = 0.1  # of the cores
_MORE: Final = 1.2  # times as many threads as cores
_PART: Final = 0.25  # of what a rank computes longer than the others


def slow_rank(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    """One rank, or the ranks of one host, that the others wait for."""
    compared = case.profile.compared
    if compared < FEW_STEPS or len(case.totals) < 2:
        return
    rank = max(case.totals, key=lambda rank: case.totals[rank].lateness)
    total = case.totals[rank]
    cost = case.others(rank, "waiting")
    if cost < max(_LEAST_WAIT, _SLOWEST * case.typical.seconds):
        return
    # Its own waits may be from the first seconds of the run, when everything is slow.
    waits = case.steps[rank].waiting > cost / 2 and total.last < _NEARLY_ALWAYS * compared
    if _blame(case, [rank]) < _MOST_BLAME or waits:
        yield from _slow_host(case)
        return
    text = (
        f"{case.named(rank)} is last in {total.last / compared:.0%} of the collectives, "
        f"{ms(total.lateness / max(1, total.last))} after the median of the others. They wait "
        f"{ms(cost)} for it in a step. "
    )
    where, advice, reason = _why_slow(case, rank)
    others = [case.starved(other) for other in case.totals if other != rank]
    excess = case.steps[rank].compute - case.others(rank, "compute")
    alike = excess < _CHANCE * case.others(rank, "compute")
    # By chance, each rank is the last one equally often.
    often = total.last / compared > (1 + 1 / len(case.totals)) / 2
    if alike and (reason == "" or (reason == "compute" and not often)):
        return
    if reason == "cpu" and case.starved(rank) <= STARVED:
        return  # other processes on the host take a core now and then
    if reason == "cpu" and median(others) > STARVED:
        return  # no rank has enough cores, and one must have the least: another rule says so
    yield Finding("slow rank", rank, cost, f"{text}{where}", advice, reason or "compute")


def _blame(case: Case, ranks: Sequence[int]) -> float:
    """The share of all lateness that some ranks have.

    A rank may be late in few collectives of a step, and by a lot: the number of them says less.
    """
    of_all = sum(total.lateness for total in case.totals.values())
    return sum(case.totals[rank].lateness for rank in ranks) / of_all if of_all else 0.0


def _slow_host(case: Case) -> Iterator[Finding]:
    hosts = case.profile.hosts
    by_host: dict[str, list[int]] = {}
    for rank in case.totals:
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    if len(by_host) < 2:
        return
    blame = {host: _blame(case, ranks) for host, ranks in by_host.items()}
    slow = max(blame, key=lambda host: blame[host])
    ranks = by_host[slow]
    rest = [rank for rank in case.totals if rank not in ranks]
    cost = median(case.steps[rank].waiting for rank in rest)
    mine = median(case.steps[rank].waiting for rank in ranks)
    share = sum(case.totals[rank].last for rank in ranks) / case.profile.compared
    if blame[slow] < _MOST_BLAME_OF_HOST or cost < max(2 * mine, _SLOWEST * case.typical.seconds):
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
    # A feed that never pauses sets the rank's pace: computing faster means waiting longer.
    if (
        what == "compute"
        and case.feed_works(rank) > BUSY_FEED
        and case.starved(rank) <= STARVED
        and excess["data"] > _PART * excess["compute"]
    ):
        what = "data"
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
        profile = case.profile
        stage = stage_text([case.totals[rank]])
        stage = stage or loader_line(profile, rank) or waiting_line(profile, rank)
        if excess["compute"] > excess["data"]:
            compute = ms(step.compute), ms(case.others(rank, "compute"))
            stage += f". Beside that it computes {compute[0]}, the others {compute[1]}"
        return (
            f"It waits {mine} for its batch, the others {theirs}{stage}",
            "look at what its batches cost; give its host more cores, or cache what is decoded",
            "data",
        )
    if what in CALLS:
        call, advice = CALLS[what]
        return f"It spends {mine} in {call}, the others {theirs}", advice, what
    return _why_computes_longer(case, rank, excess["compute"])


def _why_computes_longer(case: Case, rank: int, excess: float) -> tuple[str, str, str]:
    step = case.steps[rank]
    mine, theirs = ms(step.compute), ms(case.others(rank, "compute"))
    where = f"It computes {mine} in a step, the others {theirs}"
    starved = case.starved(rank) - median(case.starved(r) for r in case.totals if r != rank)
    throttled = case.machine(rank, "throttled")
    if throttled > THROTTLED:
        return (
            f"{where}: its container's CPU quota stops it for {throttled:.0%} of the time",
            "raise the CPU limit of its container",
            "quota",
        )
    if starved * step.seconds > excess / 2:
        why, advice, _ = why_no_core(case, rank)
        share = f"{case.starved(rank):.0%} of the time"
        return f"{where}, and its main thread has no core for {share}: {why}", advice, "cpu"
    line = more_often(case.profile, rank, case.totals)
    return (
        f"{where}{line}",
        "look at the lines that it is seen at more often than the others: "
        f"last_run.profile.flame({rank}) draws them",
        "compute" if line else "",
    )


def why_no_core(case: Case, rank: int) -> tuple[str, str, str]:
    """What takes the cores of a rank: in words, what to change, and the reason."""
    throttled = case.machine(rank, "throttled")
    if throttled > THROTTLED:
        why = f"the container's CPU quota stops it for {throttled:.0%} of the time"
        return why, "raise the CPU limit of the container", "quota"
    hosts = case.profile.hosts
    here = [other for other in case.totals if hosts.get(other) == hosts.get(rank)]
    cores = case.mean(rank, "of_cores")
    if not cores:
        return (
            "what takes the cores is not known, because the machine was not measured",
            "end other processes on this host, or fewer ranks or threads (OMP_NUM_THREADS)",
            "others",
        )
    threads = sum(case.totals[other].threads for other in here)
    if threads > _MORE * cores:
        return (
            f"its host's ranks compute with {threads} threads on {cores:.0f} cores",
            "fewer threads: OMP_NUM_THREADS or torch.set_num_threads, which the runner sets to "
            "the cores of each rank, or fewer ranks",
            "threads",
        )
    ours = sum(case.totals[other].cpu / case.totals[other].seconds for other in here)
    others = case.mean(rank, "other_cores")
    stolen = case.mean(rank, "stolen")
    if stolen > _STOLEN * cores:
        return (
            f"the host is a virtual machine, and {stolen:.1f} of its {cores:.0f} cores are taken "
            "from it by the machine below",
            "another type of machine, or another host",
            "others",
        )
    return (
        f"of the {cores:.0f} cores of its host, {count_text(len(here), 'rank')} there and other "
        f"processes take {ours:.1f} and {others:.1f}",
        "end the other processes, or fewer ranks on this host"
        if others > ours / 4
        else "more cores per task, or fewer ranks on this host",
        "others",
    )


def uneven_steps(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks that take turns at being the last one."""
    waiting = case.typical.waiting
    if case.profile.compared < FEW_STEPS or len(case.totals) < 2:
        return
    if any(finding.cause in ("slow rank", "slow host") for finding in before):
        return
    if waiting < max(10 * _LEAST_WAIT, _UNEVEN * case.typical.seconds):
        return
    crowded = max(case.mean(rank, "cpu_stall") for rank in case.totals) > _CROWDED
    if crowded or max(map(case.starved, case.totals)) > STARVED / 2:
        return  # threads that have no core are late by chance
    yield Finding(
        "uneven steps",
        None,
        waiting,
        f"the ranks take turns at being the last: each waits {ms(waiting)} in a step for others",
        "batches of the same size and length on all ranks in each step; sort rows by length, or "
        "cut them",
    )
