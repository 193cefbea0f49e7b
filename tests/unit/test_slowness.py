"""The profile of a run and its diagnosis: pure arithmetic on what ranks send."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from msgspec import structs

from horovod_runner.results.slowness.diagnosis import diagnose
from horovod_runner.results.slowness.lines import user_lines
from horovod_runner.results.slowness.profile import MAX_ROWS, RunProfile
from horovod_runner.wire.measurements import UNKNOWN, Lines, Machine, Profile, steps_of
from horovod_runner.worker.profiling.clock import Clock, cells, clock
from horovod_runner.worker.profiling.collectives import Collective, chosen, tails
from horovod_runner.worker.profiling.profiler import Profiler

SIZE = 4


def windows(rank: int, count: int = 30, waits: int = 0, **spent: float) -> list[Profile]:
    """Windows of a second with ten steps each; ``waits`` are microseconds in each collective."""
    return [
        Profile(
            rank,
            1000.0 + number,
            1.0,
            {"optimizer": 10},
            spent,
            bytes=80_000_000,
            collectives=10,
            waited=waits * 10 / 1e6,
            moved=0.05,
            arrivals=[(number * 10 + i, waits, 1_000_000 - i * 1000) for i in range(1, 11)],
        )
        for number in range(count)
    ]


def run_of(*ranks: list[Profile], hosts: Sequence[str] = ()) -> RunProfile:
    profile = RunProfile()
    profile.begin(list(hosts) or ["host"] * len(ranks))
    for together in zip(*ranks, strict=True):
        for message in together:
            profile.add(message, message.time)
    return profile


def test_the_rank_that_waits_least_is_the_one_that_others_wait_for() -> None:
    slow = windows(2, waits=100, waiting=0.01)
    others = [windows(rank, waits=40_100, waiting=0.4) for rank in (0, 1, 3)]
    found = diagnose(run_of(others[0], others[1], slow, others[2]))
    (finding,) = found.findings
    assert (finding.cause, finding.rank) == ("slow rank", 2)
    assert finding.seconds == pytest.approx(0.04)
    assert "rank 2 is last in 100% of the collectives, 40 ms after the median" in finding.text
    assert "It computes 99 ms in a step, the others 60 ms" in finding.text
    assert "10 -> 16.7 steps/s at most" in str(found)


def test_a_slow_rank_that_waits_for_data_is_told_from_one_that_computes() -> None:
    slow = windows(1, waits=100, waiting=0.01, data=0.5)
    others = [windows(rank, waits=40_100, waiting=0.4, data=0.1) for rank in (0, 2, 3)]
    found = diagnose(run_of(others[0], slow, *others[1:]))
    assert (found.findings[0].cause, found.findings[0].rank) == ("slow rank", 1)
    assert "It waits 50 ms for its batch, the others 10 ms" in found.findings[0].text


def test_one_of_two_ranks_that_waits_for_data_is_named_though_it_waited_at_the_start() -> None:
    slow = windows(1, waits=100, waiting=0.3, data=0.4)
    found = diagnose(run_of(windows(0, waits=40_100, waiting=0.4, data=0.01), slow))
    (finding,) = found.findings
    assert (finding.cause, finding.rank, finding.reason) == ("slow rank", 1, "data")
    assert "(mean of the two ranks)" in str(found)


def test_data_that_one_of_two_ranks_waits_for_is_not_said_of_both() -> None:
    ranks = [windows(0, waits=50, data=0.01), windows(1, waits=60, data=0.5)]
    assert [finding.cause for finding in diagnose(run_of(*ranks)).findings] == []


def test_the_line_of_a_slow_rank_is_named() -> None:
    profile = run_of(windows(0, waits=40_100, waiting=0.4), windows(1, waits=100))
    calls = [
        "/work/train.py\0main\x0010",
        "/work/train.py\0augment\x0020",
        "/x/site-packages/np.py\0f\x001",
    ]
    profile.add_lines(Lines(0, 100, calls, [[0]], [90]))
    profile.add_lines(Lines(1, 100, calls, [[0], [0, 1, 2]], [40, 55]))
    assert user_lines(profile, 1) == {
        "/work/train.py:20 augment": 0.55,
        "/work/train.py:10 main": 0.40,
    }
    text = diagnose(profile).findings[0].text
    assert "55% more of its time in /work/train.py:20 augment" in text


def test_the_line_of_a_slow_rank_is_named_in_the_function_in_which_the_others_wait() -> None:
    profile = run_of(windows(0, waits=40_100, waiting=0.4), windows(1, waits=100))
    calls = ["/work/train.py\0main\x0010", "/work/train.py\0main\x0020"]
    profile.add_lines(Lines(0, 100, calls, [[0], [1]], [10, 90]))
    profile.add_lines(Lines(1, 100, calls, [[0], [1]], [90, 10]))
    text = diagnose(profile).findings[0].text
    assert "80% more of its time in /work/train.py:10 main" in text


def test_other_processes_that_need_the_cores_are_named() -> None:
    profile = run_of(*(measured(rank, starved=0.3, main_cpu=0.6, cpu=0.6) for rank in range(2)))
    profile.add_machine(Machine(0, 1030.0, 5.0, cores=2.0, of_cores=2, own_cores=1.2))
    (finding,) = diagnose(profile).findings
    assert (
        "of the 2 cores of its host, 2 ranks there and other processes take 1.2 and" in finding.text
    )


@pytest.mark.parametrize(
    ("spent", "cause"),
    [
        ({"data": 0.4}, "data"),
        ({"moving": 0.5}, "communication"),
        ({"report": 0.2}, "report"),
        ({"checkpoint": 0.2}, "checkpoint"),
    ],
)
def test_what_all_ranks_spend_their_time_with_is_named(spent: dict[str, float], cause: str) -> None:
    found = diagnose(run_of(*(windows(rank, waits=50, **spent) for rank in range(SIZE))))
    assert [finding.cause for finding in found.findings] == [cause]


@pytest.mark.parametrize(("hosts", "causes"), [("aaaa", []), ("aabb", ["communication"])])
def test_few_bytes_on_one_host_take_long_for_other_reasons_than_the_network(
    hosts: str, causes: list[str]
) -> None:
    ranks = [
        [msgspec.structs.replace(window, bytes=1000) for window in windows(rank, moving=0.5)]
        for rank in range(SIZE)
    ]
    found = diagnose(run_of(*ranks, hosts=hosts))
    assert [finding.cause for finding in found.findings] == causes


def measured(rank: int, **changed: float) -> list[Profile]:
    """Windows of a rank with some fields changed."""
    return [msgspec.structs.replace(window, **changed) for window in windows(rank, waits=50)]


def test_a_main_thread_without_a_core_is_told_from_one_that_waits_for_the_lock() -> None:
    others = [windows(rank, waits=50) for rank in (0, 1, 2)]
    starved = measured(3, starved=0.4, main_cpu=0.55, late=0.2, cpu=1.5)
    (finding,) = diagnose(run_of(*others, starved)).findings
    assert (finding.cause, finding.rank, finding.reason) == ("cpu", 3, "others")
    assert (
        "rank 3 has no core for up to 40% of the time: what takes the cores is not known"
        in finding.text
    )
    profile = run_of(*others, measured(3, main_cpu=0.5, late=0.2))
    calls = ["/work/train.py\0count\x0030", "/x/python3.13/threading.py\0wait\x001"]
    profile.add_lines(Lines(3, 100, calls, [[0], [1]], [60, 90], "others"))
    (finding,) = diagnose(profile).findings
    assert (finding.cause, finding.rank) == ("interpreter lock", 3)
    assert "another thread is at /work/train.py:30 count" in finding.text
    # A main thread that computes in Python holds the lock itself.
    assert diagnose(run_of(*others, measured(3, main_cpu=0.95, late=0.2))).findings == []


def test_too_many_threads_are_told_from_other_processes() -> None:
    starved = [
        [structs.replace(row, starved=0.3, main_cpu=0.6, threads=8) for row in windows(rank)]
        for rank in range(2)
    ]
    profile = run_of(*starved)
    profile.add_machine(Machine(0, 1030.0, 5.0, cores=2.0, of_cores=2))
    profile.add_machine(Machine(1, 1030.0, 5.0, cores=2.0, of_cores=2))
    (finding,) = diagnose(profile).findings
    assert (finding.cause, finding.rank, finding.reason) == ("cpu", None, "threads")
    assert "compute with 16 threads on 2 cores" in finding.text


def test_a_rank_with_larger_batches_is_not_blamed_for_its_code() -> None:
    def with_cells(rank: int, cells: int, **changed: float) -> list[Profile]:
        steps = {"optimizer": 10, "batches": 10}
        rows = windows(rank, **changed)
        return [structs.replace(row, cells=cells * 10, steps=steps) for row in rows]

    slow = with_cells(1, 900, waits=100, waiting=0.01)
    (finding,) = diagnose(run_of(with_cells(0, 300, waits=40_100, waiting=0.4), slow)).findings
    assert (finding.cause, finding.rank, finding.reason) == ("slow rank", 1, "batches")
    assert "3.0 times as large as those of the others (900 numbers, not 300)" in finding.text


def test_a_slow_host_is_named_with_all_its_ranks() -> None:
    profile = RunProfile()
    profile.begin(["a", "a", "b", "b"])
    quick = [windows(rank, waits=40_000, waiting=0.4) for rank in (0, 1)]
    slow = [windows(2, waits=100, waiting=0.02), windows(3, waits=110, waiting=0.02)]
    for row in (row for rows in zip(*quick, *slow, strict=True) for row in rows):
        # The two slow ranks take turns.
        turned = row.rank == 3 and row.time % 2
        waits = [(n, 90, age) for n, _, age in row.arrivals] if turned else row.arrivals
        profile.add(structs.replace(row, arrivals=waits), row.time)
    (finding,) = diagnose(profile).findings
    assert (finding.cause, finding.rank) == ("slow host", None)
    assert "the ranks of host b (ranks 2-3) are last in 100% of the collectives" in finding.text


def test_ranks_that_take_turns_at_being_last_are_no_slow_rank() -> None:
    def turns(rank: int) -> list[Profile]:
        rows = windows(rank, waiting=0.3)
        return [
            structs.replace(
                row,
                arrivals=[(n, 10 if n % 2 == rank else 60_000, age) for n, _, age in row.arrivals],
            )
            for row in rows
        ]

    (finding,) = diagnose(run_of(turns(0), turns(1))).findings
    assert (finding.cause, finding.rank) == ("uneven steps", None)


def test_small_steps_are_told_from_large_tensors() -> None:
    def small(rank: int) -> list[Profile]:
        rows = windows(rank, moving=0.5)
        return [structs.replace(row, steps={"optimizer": 500}, bytes=500_000) for row in rows]

    (finding,) = diagnose(run_of(small(0), small(1))).findings
    assert finding.cause == "small steps"
    assert "a step takes 2 ms, of which 1 ms are collectives of 1 kB" in finding.text


def test_a_graph_that_waits_for_its_feed_is_noticed() -> None:
    def fed(rank: int, idle: float) -> list[Profile]:
        stages = {"decode photo": 0.8, "gather": 0.1, "idle": idle}
        return [structs.replace(row, stages=stages, cpu=1.2) for row in windows(rank)]

    profile = run_of(fed(0, 0.01), fed(1, 0.01))
    profile.add_machine(Machine(0, 1030.0, 5.0, of_cores=4))
    (finding,) = diagnose(profile).findings
    assert finding.cause == "data"
    assert 'most of it is decoding column "photo", 80% of one core' in finding.text
    assert "cache=True" in finding.advice
    assert finding.seconds == pytest.approx(0.1 - 1.2 / 10 / 4)
    assert diagnose(run_of(fed(0, 0.5), fed(1, 0.5))).findings == []


def test_a_long_warm_up_is_named_and_does_not_count_as_the_training() -> None:
    def started_slowly(rank: int) -> list[Profile]:
        return [
            structs.replace(row, steps={"optimizer": 1}) if number < 12 else row
            for number, row in enumerate(windows(rank, count=30))
        ]

    found = diagnose(run_of(started_slowly(0), started_slowly(1)))
    (finding,) = found.findings
    assert finding.cause == "warm-up"
    assert "the first 12 steps took 12.0 s, as much as 120 later ones" in finding.text
    assert found.step is not None
    assert found.step.seconds == pytest.approx(0.1)
    assert "10.8 s less in all, at most" in str(found)


def test_a_host_that_swaps_is_named() -> None:
    profile = run_of(windows(0), windows(1))
    profile.add_machine(Machine(1, 1030.0, 5.0, faults=2000, swapped=500 << 20))
    assert [finding.cause for finding in diagnose(profile).findings] == ["memory"]


def test_collectives_of_torch_are_compared_by_the_clocks_of_the_hosts() -> None:
    """Of them only the begin on each rank is known, by its host's clock."""

    def begun(rank: int, ahead: float, late: int) -> list[Profile]:
        rows = windows(rank, blocked=0.4 if not late else 0.05)
        return [
            structs.replace(
                row,
                time=row.time + ahead,
                arrivals=[(n, UNKNOWN, age - late) for n, _, age in row.arrivals],
            )
            for row in rows
        ]

    profile = RunProfile()
    profile.begin(["a", "b"])
    rows = zip(begun(0, 0.0, 0), begun(1, 7.0, 30_000), strict=True)
    for row in (row for pair in rows for row in pair):
        profile.add(row, row.time - 7.0 * row.rank + 0.001)
    found = diagnose(profile)
    (finding,) = found.findings
    assert (finding.cause, finding.rank) == ("slow rank", 1)
    assert finding.seconds == pytest.approx(0.03, rel=0.01)
    assert "30 ms after the median of the others" in finding.text


def test_what_follows_the_last_queued_collective_is_waited_for() -> None:
    first = [Collective(1, 0, 1, 1.0, 1.5, 2.0), Collective(2, 0, 1, 1.2, 2.0, 2.5)]
    second = [Collective(3, 0, 1, 4.0, 4.25, 4.5), Collective(4, 0, 1, 5.0, None, None)]
    waiting, moving = tails([*first, *second])
    assert (waiting, moving) == pytest.approx((0.8 + 0.25, 0.5 + 0.25))


def test_a_quota_of_a_container_is_named() -> None:
    profile = run_of(windows(0, waits=50), measured(1, starved=0.4))
    profile.add_machine(Machine(1, 1030.0, 5.0, throttled=2.0))
    (finding,) = diagnose(profile).findings
    assert "CPU quota stops it for 40% of the time" in finding.text
    assert finding.advice == "raise the CPU limit of the container"


def test_a_slow_rank_without_a_core_is_not_blamed_for_its_code() -> None:
    slow = [
        msgspec.structs.replace(window, starved=0.39)
        for window in windows(1, waits=100, waiting=0.01)
    ]
    profile = run_of(windows(0, waits=40_100, waiting=0.4), slow)
    text = str(diagnose(profile))
    assert "its main thread has no core for 39% of the time" in text


def test_a_rank_that_hardly_ever_lacks_a_core_is_not_accused() -> None:
    late = [
        msgspec.structs.replace(window, starved=0.1)
        for window in windows(1, waits=100, waiting=0.01)
    ]
    assert diagnose(run_of(windows(0, waits=8_000, waiting=0.08), late)).findings == []


def test_an_even_run_is_not_accused() -> None:
    found = diagnose(run_of(*(windows(rank, waits=50, data=0.02) for rank in range(SIZE))))
    assert found.findings == []
    assert str(found).endswith("Nothing stands out.")


def test_too_few_steps_say_so() -> None:
    found = diagnose(run_of(windows(0, count=1), windows(1, count=1)))
    assert "Too few steps" in str(found)
    assert "No steps were seen" in str(diagnose(RunProfile()))


def test_reductions_before_the_first_step_of_an_optimizer_are_no_steps() -> None:
    profile = RunProfile()
    for steps in ({"reductions": 1}, {"optimizer": 20, "reductions": 21}, {"optimizer": 9}):
        profile.add(Profile(0, 0.0, 1.0, steps=steps))
    assert profile.steps(0) == 29


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
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_part(batch: object, count: int) -> None:
    assert cells(batch) == count


def test_a_profiler_sends_only_what_was_measured_since() -> None:
    sent: list[Profile] = []
    lines: list[Lines] = []
    profiler = Profiler(3, 4, sent.append, lines.append)
    deadline = time.monotonic() + 30
    while len(sent) < 2 and time.monotonic() < deadline:
        clock.reports += 1
        time.sleep(0.05)  # the profiler's thread has a clock of its own
    profiler.finish()
    assert all(profile.rank == 3 and profile.seconds > 0 for profile in sent)
    assert sent[1].steps["reports"] > 0
    of_main = next(each for each in lines if each.thread == "main")
    assert of_main.total == sum(of_main.counts)


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
