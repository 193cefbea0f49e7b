"""When memory is nearly used up: the rule for a warning, and what users read."""

from __future__ import annotations

import math
import os
import random
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import RankFailedError
from horovod_runner.common.options import Options
from horovod_runner.common.slots import Slot
from horovod_runner.driver.checks import checks_of
from horovod_runner.driver.watchdog import Watchdog
from horovod_runner.host import control_groups
from horovod_runner.results import failures
from horovod_runner.results.memory import warning
from horovod_runner.task import memory
from horovod_runner.task.memory import MemoryWatch, seconds_left
from horovod_runner.task.process import WorkerProcess
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.job_file import WorkerOutcome
from horovod_runner.wire.measurements import Machine, MemoryShort, MemoryUse
from tests.unit.test_process import finish, job

MIB, GIB = 1 << 20, 1 << 30
LIMIT = 8 * GIB
SLOT = Slot(0, 0, 1, 0, 1, 0, 1, "id", "a", "10.0.0.1", "eth0")


# The rule.


def warned(free: Iterable[float]) -> tuple[float, float] | None:
    """The first warning, for free memory that is read once a second: bytes and seconds left.

    As in the task, the latest looks are compared, and of the others only the least is known.
    """
    looks: list[tuple[float, int]] = []
    lowest = LIMIT
    for second, value in enumerate(free):
        looks.append((float(second), int(value)))
        if len(looks) > memory._MOST_LOOKS:
            lowest = min(lowest, looks.pop(0)[1])
        if (seconds := seconds_left(looks, LIMIT, lowest)) is not None:
            return looks[-1][1], seconds
    return None


@pytest.mark.parametrize(
    ("megabytes", "at_least", "at_most"), [(1, 250, 300), (20, 20, 30), (150, 1, 4)]
)
def test_steady_growth_is_warned_of_while_there_is_time(
    megabytes: int, at_least: float, at_most: float
) -> None:
    found = warned(range(LIMIT, 0, -megabytes * MIB))
    assert found is not None
    left, seconds = found
    assert left < 500 * MIB
    assert at_least <= seconds <= at_most
    assert seconds == pytest.approx(left / (megabytes * MIB), rel=0.01)


def test_growth_beneath_use_that_goes_up_and_down_is_warned_of() -> None:
    steps = random.Random(3)
    found = warned(LIMIT - 10 * MIB * i - steps.uniform(0, 60 * MIB) for i in range(10_000))
    assert found is not None
    assert found[1] == pytest.approx(found[0] / (10 * MIB), rel=0.3)


def _up_and_down(least: float, most: float) -> list[float]:
    steps = random.Random(4)
    return [steps.uniform(least, most) * LIMIT for _ in range(5000)]


@pytest.mark.parametrize(
    "free",
    [
        [0.03 * LIMIT] * 1000,
        [0.001 * LIMIT] * 1000,
        [LIMIT, 0.6 * LIMIT, *[0.03 * LIMIT] * 1000],  # a large model that is loaded at once
        [LIMIT * (1 - 0.097 * i) for i in range(11)] + [0.03 * LIMIT] * 1000,
        _up_and_down(0.01, 0.04),
        _up_and_down(0.01, 0.3),
        [LIMIT * (0.04 + 0.03 * math.sin(i / 2)) for i in range(5000)],
        [LIMIT * (0.03 + math.exp(-i / 300)) for i in range(5000)],  # a cache that fills
        range(LIMIT, LIMIT // 10, -10 * MIB),  # growth, and a tenth is left
    ],
    ids=["low", "very low", "loaded", "loaded slowly", "noise", "waves", "sine", "cache", "much"],
)
def test_much_use_that_stays_is_not_warned_of(free: Iterable[float]) -> None:
    assert warned(free) is None


def test_a_small_container_is_not_always_short_of_memory() -> None:
    looks = [(float(i), 200 * MIB - i * 5 * MIB) for i in range(10)]
    assert seconds_left(looks, 400 * MIB, LIMIT) is None  # 155 of 400 MiB


# The processes of a rank.


def test_the_growth_of_a_rank_is_that_of_its_processes(tmp_path: Path) -> None:
    grows, ends, grown = tmp_path / "grows", tmp_path / "ends", tmp_path / "grown"
    for path in (grows, ends, grown):
        os.mkfifo(path)

    def main() -> None:
        kept = [b"x" * (40 << 20)]
        grown.write_bytes(b"first")
        grows.read_bytes()
        if not os.fork():
            kept.append(b"y" * (60 << 20))  # beside its copy of the first ones
            grown.write_bytes(b"child")
            ends.read_bytes()
            os._exit(0)
        kept.append(b"y" * (20 << 20))
        os.wait()

    with WorkerProcess(job(main), {}) as worker:
        assert grown.read_bytes() == b"first"
        watch = MemoryWatch(SLOT, worker.pid, worker.guard, look_seconds=0.0, processes_seconds=0.0)
        assert watch.look() is None
        assert watch.use is not None
        assert (watch.use.processes, watch.use.children, watch.use.grown) == (0, 0, 0)
        assert watch.use.limit == control_groups.memory().limit
        before = watch.use.worker
        assert before > 40 * MIB
        grows.write_bytes(b"x")
        assert grown.read_bytes() == b"child"
        watch.look()
        use = watch.use
        ends.write_bytes(b"x")
        finish(worker)
        watch.look()  # the worker has ended: what was seen stays
        assert watch.use == use
    last = watch.at_end()
    assert use.processes == 1
    assert use.children > 100 * MIB
    # Not the pages that the child has from its parent.
    assert 60 * MIB < use.grown < 100 * MIB
    assert last is not None
    assert last.age > 0
    assert last.killed in (0, None)


# What users read.


def use(free: int = 100 * MIB, **fields: Any) -> MemoryUse:
    known = {"in_container": True, "worker": 5 * GIB, "grown": 3 * GIB, "seconds": 60.0}
    return MemoryUse(LIMIT, free, **{**known, **fields})


def watchdog(notices: list[str]) -> Watchdog:
    job = Job("1a2b", 3, Options(np=-3), b"")
    return Watchdog(job, checks_of(job), notices.append, lambda: None)


def test_the_ranks_of_a_host_are_warned_of_once_and_the_one_that_grew_most_is_named() -> None:
    notices: list[str] = []
    dog = watchdog(notices)
    small = use(grown=MIB, shared=2 * GIB)
    dog.handle(0, MemoryShort(0, "a", 31.0, small))
    dog.handle(2, MemoryShort(2, "b", 250.0, use(in_container=False)))
    large = use(worker=2 * GIB, children=4 * GIB, processes=8)
    dog.handle(1, MemoryShort(1, "a", 30.0, large))
    assert dog.tick() is None
    assert notices == []  # others of the host may follow
    dog.show_shortages()
    first, second = notices
    assert first == (
        "host a will soon have no memory left: 100 MiB of the container's 8.0 GiB are free, which "
        "lasts 31 s at the present growth. Then the kernel ends a process.\n"
        "Rank 1 has grown most (3.0 GiB a minute): it has 6.0 GiB in memory (its own process 2.0 "
        "GiB, 8 child processes 4.0 GiB), 3.0 GiB more than 60 s earlier.\n"
        "Use smaller batches (and keep loss.item() from step to step, not loss), fewer ranks on a "
        "host, or a larger limit for the container (on Spark: spark.executor.memoryOverhead)."
    )
    assert "100 MiB of the host's 8.0 GiB are free, which lasts 4 min" in second
    assert "or hosts with more memory" in second
    dog.show_shortages()
    assert len(notices) == 2


def test_growth_outside_the_ranks_and_shared_memory_are_named() -> None:
    text = warning("a", {3: MemoryShort(3, "a", 10.0, use(grown=-MIB, shared=6 * GIB))})
    assert "None of the run's ranks there has grown: another process uses the memory." in text
    assert "/dev/shm holds 6.0 GiB." in text
    assert "Use fewer DataLoader workers" in text


def failure(exit_code: int, found: MemoryUse | None, error: str = "") -> str:
    worker = WorkerOutcome(False, 1, b"", error, f"{error}: no good") if error else None
    outcome = Outcome(1, 1, "a", 7, exit_code, worker=worker, memory=found)
    ended = Outcome(0, 0, "a", 6, -15, stopped=True, memory=use())
    return str(failures.run_error([ended, outcome], [1]))


KILLED = "was killed by SIGKILL ({}) before main returned"
SIX_LEFT = "6.0 GiB of the container's 8.0 GiB were left, and were used up within this time"
DETAILS = (
    "0.4 s before the end, 100 MiB of the container's 8.0 GiB were left. The rank had 5.0 GiB in "
    "memory, 3.0 GiB more than 60 s earlier. Use smaller batches"
)
KERNEL = KILLED.format("the kernel's out-of-memory killer")


@pytest.mark.parametrize(
    ("found", "texts", "has_advice"),
    [
        (use(killed=1, age=0.42), [KERNEL, DETAILS], True),
        (use(6 * GIB, killed=1, age=0.9), [KERNEL, SIX_LEFT], True),
        (
            use(6 * GIB, killed=0),
            [KILLED.format("not the out-of-memory killer: a resource manager, or another process")],
            False,
        ),
        (
            use(MIB, killed=0),
            [KILLED.format("not the kernel's out-of-memory killer; perhaps a resource manager's")],
            True,
        ),
        (
            use(6 * GIB),
            [KILLED.format("probably not the out-of-memory killer: there was memory left")],
            False,
        ),
        (use(MIB), [KILLED.format("probably the out-of-memory killer")], True),
        (None, ["SIGKILL (often the out-of-memory killer: check the host's memory)"], False),
    ],
)
def test_a_killed_rank_says_whether_it_was_for_memory(
    found: MemoryUse | None, texts: list[str], has_advice: bool
) -> None:
    text = failure(-signal.SIGKILL, found)
    assert all(each in text for each in texts)
    assert ("Use smaller batches" in text) == has_advice


def test_an_exception_after_a_child_was_killed_for_memory_says_so() -> None:
    text = failure(1, use(killed=2, children=3 * GIB, processes=1, age=2.0), "RuntimeError")
    assert "The kernel has ended 2 processes because memory was used up. 2.0 s before the" in text
    assert "memory" not in failure(1, use(killed=0), "RuntimeError")


def test_a_lost_rank_says_what_was_last_known_of_its_memory() -> None:
    machine = Machine(0, 1e9, 5.0, memory=5 * GIB, free_memory=GIB, memory_limit=8 * GIB, grown=GIB)
    error = failures.lost_error([0], [SLOT], {0: 7}, {0: machine})
    assert isinstance(error, RankFailedError)
    told = r" 1\.0 GiB .* 8\.0 GiB .* 5\.0 GiB .* 1\.0 GiB .* 60 s .*smaller batches"
    assert re.search(told, str(error))
    assert "GiB" not in str(failures.lost_error([0], [SLOT], {0: 7}, {}))
