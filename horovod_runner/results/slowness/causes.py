"""The causes of slowness that can be told apart. Each rule finds one, or says nothing.

A rule is a function of a run's profile, as a :class:`Case`, and of what the rules before it have
found. Shares below are of a step, or of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, median_low
from typing import Final

from horovod_runner.common.text import bytes_text, ranks_text
from horovod_runner.common.text import milliseconds as ms
from horovod_runner.results.slowness.case import (
    BUSY_FEED,
    CALLS,
    STARVED,
    THROTTLED,
    Case,
    Finding,
    Rule,
    stage_text,
)
from horovod_runner.results.slowness.lines import busy_thread, loader_line, waiting_line
from horovod_runner.results.slowness.slow_ranks import slow_rank, uneven_steps, why_no_core
from horovod_runner.results.slowness.totals import RankTotals

_DATA: Final = 0.15
_MOVING: Final = 0.25
_OWNCALLS: Final = 0.05
_LATE: Final = 0.1  # of the time, for the sampling thread
_BUSY_THREAD: Final = 0.5  # of the moments in which the lock was not free
_SMALL_STEP: Final = 0.005  # seconds
_SMALL_BYTES: Final = 4 << 20
_WARM_UP: Final = 0.3  # of the time of a run
_WARM_UP_SECONDS: Final = 3.0
_SWAPPED: Final = 4 << 20  # bytes in a second
_FAULTS: Final = 50  # pages in a second


def _data(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    """All ranks wait for batches. That one of them waits longer is the matter of another rule."""
    seconds = median_low(step.data for step in case.steps.values())
    totals = list(case.totals.values())
    if seconds < _DATA * case.typical.seconds:
        yield from _data_in_graph(case)
        return
    if any(finding.reason == "data" and finding.seconds > seconds for finding in before):
        return
    rank = max(case.steps, key=lambda rank: case.steps[rank].data)
    where = (
        stage_text(totals) or loader_line(case.profile, rank) or waiting_line(case.profile, rank)
    )
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


def _data_in_graph(case: Case) -> Iterator[Finding]:
    """A framework's graph that waits for batches: the threads of the feed never pause."""
    totals = list(case.totals.values())
    if any("idle" not in total.stages for total in totals):
        return
    busy = median(map(case.feed_works, case.totals))
    if busy < BUSY_FEED:
        return
    cores = max(1.0, case.mean(min(case.totals), "of_cores"))
    computed = median(total.cpu / total.step_count for total in totals) / cores
    known = case.typical.waiting + case.typical.moving
    yield Finding(
        "data",
        None,
        max(0.0, case.typical.seconds - known - computed),
        f"the feed works for {busy:.0%} of the time, and is never ahead of the training"
        f"{stage_text(totals)}",
        _data_advice(totals),
    )


def _communication(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    seconds = case.typical.moving
    if seconds < _MOVING * case.typical.seconds:
        return
    totals = case.totals.values()
    size = median(total.bytes / total.step_count for total in totals)
    hosts = len(set(case.profile.hosts.values()))
    if hosts == 1 and size < _SMALL_BYTES and case.typical.seconds >= _SMALL_STEP:
        return  # no link is so slow within a host: Horovod's threads wait for a core
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
        f"{bytes_text(size)} a step are reduced{at}, which takes {ms(seconds)}{link}",
        "larger batches or backward_passes_per_step, compression=hvd.Compression.fp16, or a faster "
        "link between the hosts",
    )


def _own_calls(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    for name, (call, advice) in CALLS.items():
        seconds = max(getattr(step, name) for step in case.steps.values())
        if seconds < _OWNCALLS * case.typical.seconds:
            continue
        if any(finding.reason == name for finding in before):
            continue
        ranks = [rank for rank, step in case.steps.items() if getattr(step, name) > seconds / 2]
        yield Finding(
            name,
            ranks[0] if len(ranks) == 1 else None,
            seconds,
            f"on {ranks_text(ranks)}, {call} takes {ms(seconds)} of a step",
            advice,
        )


def _cpu(case: Case, before: Sequence[Finding]) -> Iterator[Finding]:
    """Main threads that have no core."""
    shares = {rank: case.starved(rank) for rank in case.totals}
    throttled = {rank: case.machine(rank, "throttled") for rank in case.totals}
    starved = [rank for rank in shares if shares[rank] > STARVED or throttled[rank] > THROTTLED]
    if not starved:
        return
    worst = max(starved, key=lambda rank: max(shares[rank], throttled[rank]))
    if any(finding.reason in ("cpu", "quota") for finding in before) and len(starved) == 1:
        return
    lost = max(shares[worst], throttled[worst])
    why, advice, reason = why_no_core(case, worst)
    yield Finding(
        "cpu",
        worst if len(starved) == 1 < len(case.totals) else None,
        case.steps[worst].seconds * lost,
        f"the main thread of {ranks_text(starved)} has no core for up to {lost:.0%} of the time: "
        f"{why}",
        advice,
        reason,
    )


def _interpreter_lock(case: Case, _: Sequence[Finding]) -> Iterator[Finding]:
    """Main threads that neither run nor wait for anything known, while the lock is not free."""
    held: dict[int, float] = {}
    for rank, total in case.totals.items():
        late = total.late / total.seconds
        known = sum(total.spent.values()) + total.main_cpu + total.starved
        stopped = 1 - known / total.seconds
        busy = busy_thread(case.profile, rank)[0]
        if late > _LATE and stopped > STARVED and busy > _BUSY_THREAD:
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
        why = f"{data:.1f} s of it went into waiting for data{stage_text([start])}"
        advice = "what is packed once is used again: by longer runs, and by runs with a shared_dir"
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
    slow_rank,
    uneven_steps,
    _data,
    _communication,
    _own_calls,
    _cpu,
    _interpreter_lock,
    _memory,
    _warm_up,
)
