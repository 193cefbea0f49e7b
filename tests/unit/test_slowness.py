"""The profile of a run and its diagnosis: pure arithmetic on what ranks send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from msgspec import structs

from horovod_runner.results.slowness.diagnosis import diagnose
from horovod_runner.results.slowness.lines import user_lines
from horovod_runner.results.slowness.profile import MAX_ROWS, RunProfile
from horovod_runner.wire.measurements import UNKNOWN, Lines, Machine, Profile, Thread, steps_of
from horovod_runner.worker.profiling.clock import Clock, cells, clock
from horovod_runner.worker.profiling.collectives import Collective, chosen, tails
from horovod_runner.worker.profiling.profiler import Profiler


def windows(rank: int, count: int = 30, waits: int = 50, **changed: Any) -> list[Profile]:
    """Windows of a second with ten steps each, and ``waits`` microseconds in each collective.

    ``changed`` are fields of all windows, or seconds by what they were spent with.
    """
    fields = {name: changed.pop(name) for name in [*changed] if name in Profile.__struct_fields__}
    plain = {"bytes": 80_000_000, "waited": waits * 10 / 1e6, "steps": {"optimizer": 10}}
    return [
        Profile(
            rank,
            1000.0 + number,
            1.0,
            spent=changed,
            collectives=10,
            moved=0.05,
            arrivals=[(number * 10 + i, waits, 1_000_000 - i * 1000) for i in range(1, 11)],
            **{**plain, **fields},
        )
        for number in range(count)
    ]


def run_of(
    *ranks: list[Profile], hosts: Sequence[str] = (), also: Sequence[Machine | Lines] = ()
) -> RunProfile:
    profile = RunProfile()
    profile.begin(list(hosts) or ["host"] * len(ranks))
    for together in zip(*ranks, strict=True):
        for message in together:
            profile.add(message, message.time)
    for each in also:
        if isinstance(each, Machine):
            profile.add_machine(each)
        else:
            profile.add_lines(each)
    return profile


def waiting(*ranks: int, **changed: Any) -> list[list[Profile]]:
    """Ranks that wait 40 ms in each step for another."""
    return [windows(rank, waits=40_100, waiting=0.4, **changed) for rank in ranks]


def alike(
    size: int, hosts: str = "", also: Sequence[Machine | Lines] = (), **changed: Any
) -> RunProfile:
    return run_of(*(windows(rank, **changed) for rank in range(size)), hosts=hosts, also=also)


def with_waits(rows: list[Profile], wait: Callable[[Profile, int], int]) -> list[Profile]:
    """Windows in which a rank has waited this long in each collective, by its number."""
    return [
        structs.replace(row, arrivals=[(n, wait(row, n), age) for n, _, age in row.arrivals])
        for row in rows
    ]


def seen(rank: int, counts: dict[int, int], thread: Thread = "main") -> list[Lines]:
    """The calls at which a rank was seen; one of a library is called by the one before it."""
    stacks = [[call] if call != 1 else [0, 1, 2] for call in counts]
    return [Lines(rank, 100, CALLS, stacks, [*counts.values()], thread)]


CALLS = [
    "/work/train.py\0main\x0010",
    "/work/train.py\0augment\x0020",
    "/x/site-packages/np.py\0f\x001",
    "/work/train.py\0main\x0020",
    "/x/python3.13/threading.py\0wait\x001",
]
STARVED = {"starved": 0.3, "main_cpu": 0.6}
BATCHES = {"optimizer": 10, "batches": 10}
FEED = {"decode photo": 0.8, "gather": 0.1, "idle": 0.01}
EVEN = [windows(rank) for rank in (0, 1, 2)]
OTHER_THREAD = seen(3, {0: 60, 4: 90}, "others")
FED = alike(2, also=[Machine(0, 1030.0, 5.0, of_cores=4)], stages=FEED, cpu=1.2)
QUOTA = run_of(windows(0), windows(1, starved=0.4), also=[Machine(1, 1030.0, 5.0, throttled=2.0)])
# What is found: the cause, the rank and the reason, and a part of the text; and the profile.
FOUND: dict[tuple[str, str], RunProfile] = {
    ("slow rank 1 data", "It waits 50 ms for its batch, the others 10 ms"): run_of(
        *waiting(0, data=0.1),
        windows(1, waits=100, waiting=0.01, data=0.5),
        *waiting(2, 3, data=0.1),
    ),
    # It has waited itself at the start.
    ("slow rank 1 data", "rank 1 is last in 100% of the collectives"): run_of(
        *waiting(0, data=0.01), windows(1, waits=100, waiting=0.3, data=0.4)
    ),
    # Its feed never pauses, and takes the interpreter lock from the training.
    ("slow rank 1 data", "most of it is the stage transform, 95% of one core"): run_of(
        *waiting(0),
        windows(1, waits=100, waiting=0.01, data=0.15, stages={"transform": 0.95}),
    ),
    ("slow rank 1 compute", "It computes 100 ms in a step, the others 60 ms"): run_of(
        *waiting(0),
        windows(1, waits=100, stages={"transform": 0.95}),
        also=seen(0, {0: 90}) + seen(1, {0: 40, 1: 55}),
    ),
    ("slow rank 1 compute", "55% more of its time in /work/train.py:20 augment"): run_of(
        *waiting(0), windows(1, waits=100), also=seen(0, {0: 90}) + seen(1, {0: 40, 1: 55})
    ),
    # The others wait in the same function.
    ("slow rank 1 compute", "80% more of its time in /work/train.py:10 main"): run_of(
        *waiting(0), windows(1, waits=100), also=seen(0, {0: 10, 3: 90}) + seen(1, {0: 90, 3: 10})
    ),
    ("slow rank 1 batches", "3.0 times as large as those of the others (900 numbers, not"): run_of(
        *waiting(0, cells=3000, steps=BATCHES),
        windows(1, waits=100, waiting=0.01, cells=9000, steps=BATCHES),
    ),
    ("slow rank 1 cpu", "its main thread has no core for 39% of the time"): run_of(
        *waiting(0), windows(1, waits=100, waiting=0.01, starved=0.39)
    ),
    # Two slow ranks that take turns.
    ("slow host None", "the ranks of host b (ranks 2-3) are last in 100% of the coll"): run_of(
        *waiting(0, 1),
        windows(2, waits=100, waiting=0.02),
        with_waits(windows(3, waiting=0.02), lambda row, _: 90 if row.time % 2 else 110),
        hosts="aabb",
    ),
    ("uneven steps None", "the ranks take turns"): run_of(
        *(
            with_waits(
                windows(rank, waiting=0.3), lambda row, n: 60_000 - 59_990 * (n % 2 == row.rank)
            )
            for rank in (0, 1)
        )
    ),
    ("small steps None", "a step takes 2 ms, of which 1 ms are collectives of 1 kB"): alike(
        2, moving=0.5, steps={"optimizer": 500}, bytes=500_000
    ),
    ("communication None", "100 bytes a step are"): alike(4, "aabb", moving=0.5, bytes=1000),
    ("communication None", "8.0 MB a step are reduced"): alike(4, moving=0.5),
    ("data None", "40 ms for each"): alike(4, data=0.4),
    ("report None", "report() takes 20 ms"): alike(4, report=0.2),
    ("checkpoint None", "save_checkpoint() or commit() takes 20 ms"): alike(4, checkpoint=0.2),
    ("data None", 'most of it is decoding column "photo", 80% of one core'): FED,
    (
        "cpu None others",
        "2 cores of its host, 2 ranks there and other processes take 1.2 and",
    ): alike(2, also=[Machine(0, 1030.0, 5.0, 2.0, 2, own_cores=1.2)], cpu=0.6, **STARVED),
    (
        "cpu 3 others",
        "rank 3 has no core for up to 40% of the time: what takes the cores is",
    ): run_of(*EVEN, windows(3, starved=0.4, main_cpu=0.55, late=0.2, cpu=1.5)),
    ("cpu None threads", "compute with 16 threads on 2 cores"): alike(
        2, also=[Machine(rank, 1030.0, 5.0, 2.0, 2) for rank in (0, 1)], threads=8, **STARVED
    ),
    ("cpu 1 quota", "CPU quota stops it for 40% of the time"): QUOTA,
    ("interpreter lock 3", "another thread is at /work/train.py:10 main"): run_of(
        *EVEN, windows(3, main_cpu=0.5, late=0.2), also=OTHER_THREAD
    ),
    ("memory None", "swaps 105 MB/s"): alike(
        2, also=[Machine(1, 1030.0, 5.0, faults=2000, swapped=500 << 20)]
    ),
}


@pytest.mark.parametrize(("what", "text"), FOUND)
def test_what_makes_a_run_slow_is_named(what: str, text: str) -> None:
    (finding,) = diagnose(FOUND[what, text]).findings
    assert f"{finding.cause} {finding.rank} {finding.reason}".strip() == what
    assert text in finding.text


QUIET: dict[str, RunProfile] = {
    "even ranks": alike(4, data=0.02),
    "one of two waits for data": run_of(windows(0, data=0.01), windows(1, waits=60, data=0.5)),
    "few bytes on one host": alike(4, "aaaa", moving=0.5, bytes=1000),
    # A main thread that computes in Python holds the lock itself.
    "Python": run_of(*EVEN, windows(3, main_cpu=0.95, late=0.2), also=OTHER_THREAD),
    "a feed that is idle for half of the time": alike(2, stages={**FEED, "idle": 0.5}, cpu=1.2),
    # By chance it is also seen at one line more often.
    "a rank that is last in every other step": run_of(
        with_waits(windows(0, waiting=0.06), lambda _, n: 12_000 * (n % 2)),
        with_waits(windows(1, waiting=0.02), lambda _, n: 4_000 * ((n + 1) % 2)),
        also=seen(0, {0: 90}) + seen(1, {0: 80, 1: 10}),
    ),
    "a rank that hardly ever lacks a core": run_of(
        windows(0, waits=8_000, waiting=0.08), windows(1, waits=100, waiting=0.01, starved=0.1)
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_costs_no_time_is_not_named(case: str) -> None:
    found = diagnose(QUIET[case])
    assert found.findings == []
    assert str(found).endswith("Nothing stands out.")


def test_the_rank_that_waits_least_is_the_one_that_others_wait_for() -> None:
    found = diagnose(run_of(*waiting(0, 1), windows(2, waits=100, waiting=0.01), *waiting(3)))
    (finding,) = found.findings
    assert (finding.cause, finding.rank) == ("slow rank", 2)
    assert finding.seconds == pytest.approx(0.04)
    assert "rank 2 is last in 100% of the collectives, 40 ms after the median" in finding.text
    assert "It computes 99 ms in a step, the others 60 ms" in finding.text
    assert "10 -> 16.7 steps/s at most" in str(found)
    assert "(median rank)" in str(found)


def test_advice_and_cost_are_those_of_the_cause() -> None:
    (fed,) = diagnose(FED).findings
    assert "cache=True" in fed.advice
    assert fed.seconds == pytest.approx(0.1 - 1.2 / 10 / 4)
    (quota,) = diagnose(QUOTA).findings
    assert quota.advice == "raise the CPU limit of the container"
    assert "(mean of the two ranks)" in str(diagnose(QUOTA))
    profile = run_of(EVEN[0], also=seen(0, {0: 40, 1: 55}))
    lines = {"/work/train.py:20 augment": 0.55, "/work/train.py:10 main": 0.40}
    assert user_lines(profile, 0) == lines


def test_a_long_warm_up_is_named_and_does_not_count_as_the_training() -> None:
    slowly = [
        windows(rank, count=12, steps={"optimizer": 1}) + windows(rank, count=30)[12:]
        for rank in (0, 1)
    ]
    found = diagnose(run_of(*slowly))
    (finding,) = found.findings
    assert finding.cause == "warm-up"
    assert "the first 12 steps took 12.0 s, as much as 120 later ones" in finding.text
    assert found.step is not None
    assert found.step.seconds == pytest.approx(0.1)
    assert "10.8 s less in all, at most" in str(found)


def test_first_steps_in_which_one_rank_waits_for_data_are_not_taken_for_a_compilation() -> None:
    slowly = [
        windows(rank, count=12, steps={"optimizer": 1}, data=0.8 * rank)
        + windows(rank, count=30)[12:]
        for rank in (0, 1)
    ]
    (finding,) = diagnose(run_of(*slowly)).findings
    assert finding.cause == "warm-up"
    assert "9.6 s of it went into waiting for data" in finding.text


@pytest.mark.parametrize(("data", "first"), [(0.2, "warm-up"), (0.4, "data")])
def test_what_costs_the_larger_part_of_the_run_comes_first(data: float, first: str) -> None:
    """The first steps cost 15 of 44 s; waiting for data its part of each third of a second."""
    slowly = [
        windows(rank, count=22, steps={"optimizer": 1}, data=data)
        + windows(rank, count=44, steps={"optimizer": 3}, data=data)[22:]
        for rank in (0, 1)
    ]
    found = [finding.cause for finding in diagnose(run_of(*slowly)).findings]
    assert (found[0], {*found}) == (first, {"warm-up", "data"})


def test_collectives_of_torch_are_compared_by_the_clocks_of_the_hosts() -> None:
    """Of them only the begin on each rank is known, by its host's clock."""
    profile = RunProfile()
    profile.begin(["a", "b"])
    for rows in zip(windows(0, blocked=0.4), windows(1, blocked=0.05), strict=True):
        for row, ahead, late in zip(rows, (0.0, 7.0), (0, 30_000), strict=True):
            begun = [(n, UNKNOWN, age - late) for n, _, age in row.arrivals]
            changed = structs.replace(row, time=row.time + ahead, arrivals=begun)
            profile.add(changed, row.time + 0.001)
    (finding,) = diagnose(profile).findings
    assert (finding.cause, finding.rank) == ("slow rank", 1)
    assert finding.seconds == pytest.approx(0.03, rel=0.01)
    assert "30 ms after the median of the others" in finding.text


def test_what_follows_the_last_queued_collective_is_waited_for() -> None:
    first = [Collective(1, 0, 1, 1.0, 1.5, 2.0), Collective(2, 0, 1, 1.2, 2.0, 2.5)]
    second = [Collective(3, 0, 1, 4.0, 4.25, 4.5), Collective(4, 0, 1, 5.0, None, None)]
    waiting, moving = tails([*first, *second])
    assert (waiting, moving) == pytest.approx((0.8 + 0.25, 0.5 + 0.25))


def test_too_few_steps_say_so() -> None:
    found = diagnose(run_of(windows(0, count=1), windows(1, count=1)))
    assert "Too few steps" in str(found)
    assert "No steps were seen" in str(diagnose(RunProfile()))


def test_reductions_before_the_first_step_of_an_optimizer_are_no_steps() -> None:
    profile = RunProfile()
    for steps in ({"reductions": 1}, {"optimizer": 20, "reductions": 21}, {"optimizer": 9}):
        profile.add(Profile(0, 0.0, 1.0, steps=steps))
    assert profile.steps(0) == 29


def test_counts_of_a_hostile_rank_stay_within_what_a_record_can_hold() -> None:
    profile = RunProfile()
    for number in range(MAX_ROWS + 1):
        counts = {"batches": 2**63 - 1, "steps": -(2**63)}
        profile.add(Profile(0, float(number), 1.0, counts, bytes=2**63 - 1), now=float(number))
    assert msgspec.msgpack.encode(profile.saved())


def test_rows_are_merged_when_there_are_many() -> None:
    profile = run_of(windows(0, count=MAX_ROWS + 1, data=0.5))
    rows = profile.table()
    assert rows.num_rows < MAX_ROWS
    assert sum(rows["seconds"].to_pylist()) == pytest.approx(MAX_ROWS + 1)
    assert sum(rows["steps"].to_pylist()) == 10 * (MAX_ROWS + 1)
    assert profile.totals[0].spent["data"] == pytest.approx((MAX_ROWS - 1) / 2)


def test_the_clocks_of_hosts_are_compared_by_the_starts_of_collectives() -> None:
    ahead = [structs.replace(row, time=row.time + 2.5) for row in windows(1)]
    offsets = run_of(windows(0), ahead).clock_offsets
    assert offsets == {0: 0.0, 1: pytest.approx(2.5)}


def test_ranks_choose_the_same_collectives_at_different_rates() -> None:
    def numbers(count: int) -> set[int]:
        all_of_them = [Collective(n, 0, 1, 0.0, 0.0, 0.0) for n in range(1, count + 1)]
        return {each.number for each in chosen(all_of_them, 100)}

    assert 50 < len(numbers(1000)) <= 100
    assert numbers(400) & {*range(1, 401)} >= numbers(1000) & {*range(1, 401)}


def test_the_clock_tells_the_main_thread_from_others() -> None:
    clock = Clock()
    with clock.timing("data"):
        pass
        with clock.timing("data"), clock.stage("gather"):
            pass  # a DataLoader around a feed
    inside = dict(clock.seconds)

    def other() -> None:
        with clock.timing("data"), clock.stage("decode photo"):
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert set(clock.seconds) == {"data"}
    assert clock.seconds == inside
    assert set(clock.stages) == {"gather", "decode photo"}
    assert clock.stages["gather"] < clock.seconds["data"]


class Ragged:
    """As a nested tensor of torch, whose rows differ in length."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no sizes")


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (np.zeros((4, 3)), 12),
        ({"x": np.zeros((4, 3)), "y": np.zeros(4)}, 12),
        ((np.zeros((4, 3)), np.zeros(4)), 12),
        ([[np.zeros(5)], 1], 5),
        ([1, 2, 3], 3),
        (["a", "b"], 2),
        ({}, 0),
        (None, 0),
        ((Ragged(),), 0),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_part(batch: object, count: int) -> None:
    assert cells(batch) == count


def report_until_sent(sent: list[Profile], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(sent) < count and time.monotonic() < deadline:
        clock.reports += 1
        time.sleep(0.05)  # the profiler sends once a second, by the real clock


def test_a_profiler_sends_only_what_was_measured_since() -> None:
    sent: list[Profile] = []
    lines: list[Lines] = []
    profiler = Profiler(3, 4, sent.append, lines.append)
    report_until_sent(sent, 2)
    profiler.finish()
    assert all(profile.rank == 3 and profile.seconds > 0 for profile in sent)
    assert sent[1].steps["reports"] > 0
    of_main = next(each for each in lines if each.thread == "main")
    assert of_main.total == sum(of_main.counts)


def test_a_number_of_threads_that_main_sets_late_is_seen() -> None:
    import torch

    sent: list[Profile] = []
    profiler = Profiler(3, 4, sent.append, lambda _: None)
    before = torch.get_num_threads()
    try:
        report_until_sent(sent, 1)  # so the profiler has asked torch before
        torch.set_num_threads(before + 3)
        report_until_sent(sent, len(sent) + 2)
        assert (sent[0].threads, sent[-1].threads) == (before, before + 3)
    finally:
        torch.set_num_threads(before)
        profiler.finish()


def test_a_second_without_a_batch_has_no_steps_though_it_reports() -> None:
    sent: list[Profile] = []
    profiler = Profiler(3, 4, sent.append, lambda _: None)
    profiler.finish()
    clock.count_batch(1)
    profiler._summarize()
    clock.count_report()
    clock.count_report()
    profiler._summarize()
    assert (sent[-1].steps["batches"], sent[-1].steps["reports"]) == (0, 2)
    assert steps_of(sent[-1].steps) == 0


def test_a_flame_graph_has_a_box_for_each_call_as_wide_as_its_share(tmp_path: Path) -> None:
    profile = RunProfile()
    calls = ["/work/train.py\0main\x0010", "/work/a<b.py\0read\x0020", "/work/c.py\0step\x0030"]
    profile.add_lines(Lines(0, 100, calls, [[0, 1], [0, 2]], [25, 75]))
    root = ElementTree.fromstring(profile.flame(path=tmp_path / "flame.svg"))
    assert (tmp_path / "flame.svg").read_text() == profile.flame()
    boxes = {
        group.find("{*}title").text: float(group.find("{*}rect").get("width"))  # type: ignore[union-attr, arg-type]
        for group in root.iter("{http://www.w3.org/2000/svg}g")
    }
    assert boxes == {
        "/work/train.py:10 main: 100.0%": 1200.0,
        "/work/a<b.py:20 read: 25.0%": 300.0,
        "/work/c.py:30 step: 75.0%": 900.0,
    }
    with pytest.raises(ValueError, match=r"rank 1 .*profile=False"):
        profile.flame(1)
