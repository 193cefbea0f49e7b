"""When a run hangs, who waits for whom, and how stacks are read: pure logic, told the time."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_runner.common import stacks
from horovod_runner.common.limits import Limits
from horovod_runner.common.options import ClusterConfig, DebugConfig, Options
from horovod_runner.driver.checks import checks_of
from horovod_runner.driver.hangs import HangWatch
from horovod_runner.driver.waits import TorchWaits
from horovod_runner.driver.watchdog import Watchdog
from horovod_runner.task.stall_reader import StallReader
from horovod_runner.wire import events, messages
from horovod_runner.wire.job import Job
from horovod_runner.wire.measurements import Lines, Waiting, Waits, is_waits
from horovod_runner.wire.messages import Alive, Stacks, Stall
from horovod_runner.worker.profiling.clock import clock
from horovod_runner.worker.profiling.flight_recorder import FlightRecorder
from horovod_runner.worker.profiling.profiler import Profiler

MAIN = 'File "/home/me/train.py", line {line} in step'


def dump(line: int, *, other: int = 0) -> str:
    """What faulthandler writes of a worker with two threads."""
    thread = f'Thread 0x01 (most recent call first):\n  File "/lib/q.py", line {other} in get\n'
    own = 'File "/x/site-packages/horovod_runner/worker/main.py", line 3 in main'
    inner = 'File "/x/site-packages/horovod/torch/mpi_ops.py", line 5 in synchronize'
    frames = [inner, MAIN.format(line=line), own]
    return thread + "Current thread 0x02 (most recent call first):\n  " + "\n  ".join(frames) + "\n"


class Clock:
    """Runs a HangWatch for ranks that answer with the given stacks."""

    dump = staticmethod(dump)

    def __init__(self, size: int, timeout: float | None = 10.0, check: float = 2.0) -> None:
        self.watch = HangWatch(timeout, check)
        self.now = 1000.0
        self.size = size
        self.steps: list[tuple[float, str]] = []
        for rank in range(size):
            self.watch.started(rank)

    def run(self, seconds: int, *, every: int = 2, busy: int | None = None, **alive: float):
        start = self.now
        for second in range(seconds):
            self.now = start + second
            for rank in range(self.size):
                own = {"idle": 0.0} if rank == busy else {}
                self.watch.alive(rank, Alive(**{"quiet": 1e6, **alive, **own}), self.now)
            if every and second % every == 0:
                self.watch.stalled([Stall("allreduce.a", (1,))], self.now)
            step = self.watch.step(self.now)
            if step == "look":
                for rank in range(self.size):
                    self.watch.shown(rank, self.dump(rank))
            if step:
                self.steps.append((self.now - start, step))
            if step == "end":
                return


def test_a_stalled_tensor_is_warned_of_and_ends_the_run_at_the_timeout() -> None:
    clock = Clock(3)
    clock.run(60)
    names = [name for _, name in clock.steps]
    assert names[:2] == ["look", "warn"]
    assert names.count("warn") == 1
    assert names[-1] == "end"
    assert 8 <= clock.steps[-1][0] <= 10  # it had waited for 2 when it was told
    assert clock.watch.describe(3) == "ranks 0, 2 wait in allreduce.a for rank 1"
    assert "rank 1: train.py:1 in step, inside synchronize" in clock.watch.places()


@pytest.mark.parametrize(
    ("timeout", "seconds", "alive", "steps"),
    [
        (10.0, 60, {"every": 6}, {"look", "warn"}),  # slow steps, each of which stalls for a while
        (10.0, 60, {"quiet": 1.0}, {"look", "warn"}),  # a rank prints
        (10.0, 60, {"every": 0, "idle": 0.0}, set()),  # the ranks compute
        (None, 4000, {}, {"look", "warn"}),
    ],
)
def test_progress_and_no_timeout_keep_a_run_from_its_end(
    timeout: float | None, seconds: int, alive: dict[str, Any], steps: set[str]
) -> None:
    clock = Clock(2, timeout)
    clock.run(seconds, **alive)
    names = [name for _, name in clock.steps]
    assert set(names) <= steps
    if timeout is None:
        assert names.count("warn") == 1


def test_a_stall_that_dissolves_is_forgotten_and_the_next_is_warned_of() -> None:
    clock = Clock(2, timeout=1000)
    clock.run(10)
    clock.run(20, every=0)
    assert clock.watch.seconds(clock.now) == 0
    clock.run(10)
    assert [name for _, name in clock.steps if name == "warn"] == ["warn", "warn"]


@pytest.mark.parametrize(("gone", "told"), [(None, ""), (1, "; rank 1 already returned from main")])
def test_idle_ranks_hang_and_those_that_ended_are_told(gone: int | None, told: str) -> None:
    clock = Clock(2)
    if gone is not None:
        clock.watch.ended(gone)
    clock.run(60, every=0, idle=20.0)
    assert clock.steps[-1][1] == "end"
    assert clock.watch.describe(2) == f"no rank computes or prints anything{told}"


def test_an_idle_rank_in_a_collective_waits_for_one_that_computes() -> None:
    clock = Clock(2)
    clock.run(60, every=0, idle=20.0, busy=1)
    assert [name for _, name in clock.steps] == ["look", "look", "warn", "look", "end"]
    assert clock.watch.describe(2) == "rank 0 waits in a collective for rank 1"
    assert "the same collectives" in clock.watch.advice()


def test_an_idle_rank_elsewhere_lets_the_others_compute() -> None:
    clock = Clock(2)
    clock.dump = lambda rank: dump(rank).replace("horovod/torch", "queue")
    clock.run(60, every=0, idle=20.0, busy=1)
    assert {name for _, name in clock.steps} == {"look"}
    assert clock.watch.seconds(clock.now) == 0


def test_a_rank_that_leaves_its_collective_no_longer_waits() -> None:
    clock = Clock(2)
    clock.run(5, every=0, idle=5.0, busy=1)
    assert clock.steps[-1][1] == "warn"
    clock.run(60, every=0, idle=0.5)
    assert clock.steps[-1][1] == "warn"
    assert clock.watch.seconds(clock.now) == 0


def test_many_tensors_that_wait_for_the_same_ranks_are_told_together() -> None:
    watch = HangWatch(10, 2)
    for rank in range(4):
        watch.started(rank)
    watch.stalled([Stall(f"t{number}", (2, 3)) for number in range(5)], 0)
    assert watch.describe(4) == "ranks 0-1 wait in t0, t1, t2 and 2 more for ranks 2-3"


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, 60), (1800.0, 60), (30.0, 5), (3.0, 1), (0.5, 1)]
)
def test_the_first_look_comes_well_before_the_timeout(timeout: float | None, seconds: int) -> None:
    options = Options(np=1, debug_config=DebugConfig(hang_timeout=timeout))
    assert options.stall_check_seconds == seconds


def test_the_main_threads_stack_comes_first_and_ends_where_the_users_code_does() -> None:
    main, other = stacks.split_threads(dump(41, other=7))
    assert [frame.rpartition(" in ")[2] for frame in main] == ["synchronize", "step"]
    assert other == ['File "/lib/q.py", line 7 in get']


def test_the_thread_that_measures_a_rank_is_not_shown() -> None:
    thread = 'Thread 0x2 (most recent call first):\n  File "/lib/threading.py", line 5 in wait\n'
    thread += '  File "/x/horovod_runner/worker/profiling/profiler.py", line 60 in _run\n'
    assert stacks.split_threads(thread + dump(41)) == stacks.split_threads(dump(41))


def test_a_place_names_the_users_line_and_the_innermost_function() -> None:
    assert stacks.place(dump(41)) == "train.py:41 in step, inside synchronize"
    assert stacks.place("") == stacks.NO_ANSWER


def test_ranks_with_the_same_stacks_are_shown_together() -> None:
    shown = stacks.show({0: dump(1), 1: dump(2), 2: dump(1), 3: ""})
    assert [line for line in shown.splitlines() if line.startswith("Stack")] == [
        "Stack of ranks 0, 2:",
        "Stack of rank 1:",
        "Stack of rank 3:",
    ]
    assert stacks.NO_ANSWER in shown


def test_of_many_different_stacks_the_most_common_one_and_the_rarest_are_shown() -> None:
    by_rank = {rank: dump(1000 if rank % 4 == 0 else rank) for rank in range(64)}
    shown = stacks.show(by_rank).splitlines()
    titles = [line for line in shown if line.startswith("Stack of")]
    assert titles[0] == "Stack of ranks 0, 4, 8, 12, 16, 20, 24, 28, 32, ... (16 in all):"
    assert titles[1:] == [f"Stack of rank {rank}:" for rank in (1, 2, 3, 5, 6, 7, 9)]
    assert shown[-1].endswith("... (41 in all) are left out: they differ from these.")


def test_a_second_request_shows_the_stacks_of_now() -> None:
    shown: list[str] = []
    cluster = ClusterConfig(limits=Limits(stacks_shown=3600))
    job = Job("1a2b", 2, Options(np=-2, cluster_config=cluster), b"")
    watchdog = Watchdog(job, checks_of(job), shown.append, lambda: None)
    for rank in range(2):
        watchdog.started(rank)
    for line in (41, 57):
        watchdog.show_stacks()
        for rank in range(2):
            watchdog.tick()  # shows nothing: not all ranks have answered this request
            watchdog.handle(rank, Stacks(dump(line)))
        watchdog.tick()
    first, second = shown
    assert MAIN.format(line=41) in first
    assert MAIN.format(line=57) in second
    assert MAIN.format(line=41) not in second


def test_what_horovods_stall_inspector_prints_is_read_also_in_pieces() -> None:
    reader = StallReader()
    head = "[2026-01-31 12:00:00.1: W /b/common/stall_inspector.cc:107] One or more tensors were "
    assert reader.feed(["epoch 1"]) == ([], True)
    assert reader.feed([head, "Missing ranks:"]) == ([], False)
    stalls, other = reader.feed(["1: [allreduce.a, allreduce.b]", "3!: [allreduce.a ...]"])
    assert not other
    assert stalls == [Stall("allreduce.a", (1, 3)), Stall("allreduce.b", (1,))]
    assert reader.feed(["4: [not of this]", "epoch 2"]) == ([Stall("not of this", (4,))], True)
    assert reader.feed(["5: [nor this]"]) == ([], True)


def test_the_thread_that_measures_a_rank_is_not_among_its_last_lines() -> None:
    profiler = [
        "Thread 0x00007f (most recent call first):",
        '  File "/python3.13/threading.py", line 363 in wait',
        '  File "/x/horovod_runner/worker/profiling/profiler.py", line 77 in _measure',
        "",
    ]
    main = [
        "Current thread 0x00007e (most recent call first):",
        '  File "/work/train.py", line 3 in train',
    ]
    before = ["epoch 3", "Fatal Python error: Aborted", ""]
    assert stacks.without_profiler([*before, *profiler, *main, "end"]) == [*before, *main, "end"]
    assert stacks.without_profiler([*before, *main, "", *profiler[:-1]]) == [*before, *main, ""]
    assert stacks.without_profiler(main) == main


def waits(size: int, *said: tuple[int, str, list[int]]) -> list[Stall]:
    """The stalls that follow from what ranks say at the same time."""
    found = TorchWaits(size, 10)
    for rank, name, ranks in said:
        found.take(rank, Waits(rank, [Waiting(name, ranks)]), 100)
    return list(found.stalls(105))


@pytest.mark.parametrize(
    ("size", "said", "stalls"),
    [
        (2, [(0, "all_reduce 7", []), (1, "all_reduce 7", [])], []),
        (
            3,
            [(0, "all_reduce 7", []), (2, "all_reduce 7", [])],
            [Stall("all_reduce 7", (1,))],
        ),
        (
            4,
            [(0, "all_gather 3 (ranks 0-1)", [0, 1]), (3, "all_gather 3 (ranks 2-3)", [2, 3])],
            [Stall("all_gather 3 (ranks 0-1)", (1,)), Stall("all_gather 3 (ranks 2-3)", (2,))],
        ),
        (
            2,
            [(0, "all_reduce 7", []), (1, "broadcast 7", [])],
            [Stall("all_reduce 7", (1,)), Stall("broadcast 7", (0,))],
        ),
    ],
)
def test_a_rank_that_has_not_entered_a_collective_of_its_group_is_missing(
    size: int, said: list[tuple[int, str, list[int]]], stalls: list[Stall]
) -> None:
    assert waits(size, *said) == stalls


@pytest.mark.parametrize("name", ["broadcast 7", "gather 7", "_reduce_oop 7", "scatter 7"])
def test_ranks_that_may_have_passed_a_rooted_collective_are_not_missing(name: str) -> None:
    assert waits(3, (0, name, [])) == []
    assert waits(3, (0, name, [0, 2])) == [Stall(name, (2,))]  # of two, it is the other one


def test_ranks_that_say_a_little_later_that_they_wait_are_not_missing() -> None:
    found, watch = TorchWaits(2, 10), HangWatch(10, 2)
    found.take(0, Waits(0, [Waiting("all_reduce 7")]), 100)
    assert found.news(100) is None
    found.take(1, Waits(1, [Waiting("all_reduce 7")]), 101)
    assert found.news(101.5) == []
    assert found.news(110) is None  # until a rank says something
    for rank in range(2):
        watch.started(rank)
    found.take(0, Waits(0, [Waiting("all_reduce 8")]), 120)
    stalls = found.news(122)
    assert stalls == [Stall("all_reduce 8", (1,))]
    watch.stalled([Stall("allreduce.a", (1,))], 122)
    watch.stalled_in_torch(stalls, 122)
    assert "allreduce.a, all_reduce 8 for rank 1" in watch.describe(2)
    found.take(1, Waits(1, [Waiting("all_reduce 8")]), 123)
    watch.stalled_in_torch(found.news(125) or [], 125)
    assert watch.describe(2) == "rank 0 waits in allreduce.a for rank 1"


def test_a_rank_that_waits_says_so_also_if_another_of_its_threads_reports() -> None:
    waiting = Waiting("all_reduce 7")

    class Stalled(FlightRecorder):
        def waits(self, seconds: float) -> list[Waiting]:
            return [waiting]

    said: list[Lines | Waits] = []
    profiler = Profiler(
        1, 2, lambda _: None, said.append, stall_seconds=0.0, flight_recorder=Stalled()
    )
    profiler.finish()
    said.clear()
    clock.count_report()
    profiler._summarize()
    assert said == [Waits(1, [waiting])]


def test_what_a_rank_said_counts_until_it_says_something_else_or_nothing() -> None:
    found = TorchWaits(2, 10)
    found.take(0, Waits(0, [Waiting("all_reduce 7")]), 100)
    found.take(0, Waits(0, [Waiting("all_reduce 8")]), 105)
    assert [stall.tensor for stall in found.stalls(110)] == ["all_reduce 8"]
    assert list(found.stalls(116)) == []
    found.take(0, Waits(0, [Waiting("all_reduce 8")]), 120)
    found.ended(0)
    assert list(found.stalls(121)) == []


def test_a_message_about_waits_is_recognized_without_decoding_it() -> None:
    assert is_waits(messages.encode(Waits(0, [])))
    assert not is_waits(messages.encode(Lines(0, 0)))
    assert not is_waits(messages.encode(events.Log(0, "Waits")))
