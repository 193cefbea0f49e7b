"""Runs whose records are made up, for what draws runs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from horovod_runner.common.slots import RankInfo
from horovod_runner.results import saved_run
from horovod_runner.results.run import Attempt, Line, Run, Status, Timings
from horovod_runner.results.run_log import RunLog
from horovod_runner.wire.events import AttemptBegan, Notice, Output, RanksPlaced, Report, RunEnded
from horovod_runner.wire.measurements import Lines, Machine, Profile

BEGAN = 1_750_000_000.0
STEPS = 10  # of a rank in a second
CALLS = [
    "/work/train.py\0train\x0012",
    "/work/train.py\0augment\x0040",
    "/x/site-packages/horovod/torch/optimizer.py\0DistributedOptimizer.step\x00294",
    "/x/site-packages/torch/nn/modules/linear.py\0Linear.forward\x00125",
]


def made_up_run(
    size: int,
    seconds: int = 60,
    *,
    slow_rank: int | None = None,
    status: Status = "finished",
    per_host: int = 4,
    profile: bool = True,
    reporting: Sequence[int] = (0,),
) -> Run:
    """A run whose record looks as if ``size`` ranks had trained for some time."""
    run = Run(
        f"{size:08x}",
        size,
        {"np": size, "lr": 0.1, "epochs": 3, "api_token": "hf_hidden", "max_tokens": 512},
        main="train",
        where="spark://master:7077",
        software={"horovod": "0.28.1", "torch": "2.9.0", "Python": "3.13.5"},
        timings=Timings(BEGAN),
    )
    log, dice = RunLog(run), random.Random(size)
    hosts = [f"worker-{rank // per_host}" for rank in range(size)]
    log.add([AttemptBegan(1)])
    run.attempts[0].started = BEGAN + 1
    ranks = [RankInfo(rank, host, 100 + rank, (), 0) for rank, host in enumerate(hosts)]
    log.add([RanksPlaced(ranks)])
    for second in range(seconds):
        for rank in range(size):
            if profile:
                log.add(list(_measured(rank, second, dice, is_slow=rank == slow_rank)))
            if rank in reporting:
                log.add(_reports(rank, second, dice))
    for rank in range(size if profile else 0):
        seen = [70, 20, 0, 10] if rank == slow_rank else [30, 0, 60, 10]
        log.add([Lines(rank, 100, CALLS, [[0], [0, 1], [0, 2], [0, 3]], seen)])
    for rank in range(min(size, 8)):
        log.add([Output(rank, "stdout", f"rank {rank} begins\nrank {rank} ")])
        log.add([Output(rank, "stdout", "ends\n")])
    log.add([Notice("controller: gloo"), RunEnded(status, [], "")])
    run.timings.end = run.attempts[0].ended = BEGAN + seconds + 5
    return run


def _measured(
    rank: int, second: int, dice: random.Random, *, is_slow: bool
) -> Iterator[Profile | Machine]:
    now = BEGAN + 4 + second
    waiting = 0.01 if is_slow else dice.uniform(0.3, 0.4)
    waits = 100 if is_slow else round(waiting * 1e5)
    yield Profile(
        rank,
        now,
        1.0,
        {"optimizer": STEPS},
        {"data": dice.uniform(0.02, 0.05), "waiting": waiting, "moving": 0.08},
        bytes=40_000_000,
        collectives=STEPS,
        waited=waiting,
        moved=0.08,
        arrivals=[(second * STEPS + i, waits, 1_000_000 - i * 1000) for i in range(STEPS)],
        cpu=1.2,
        main_cpu=0.6,
    )
    if second % 5 == 4:
        yield Machine(
            rank,
            now,
            5.0,
            dice.uniform(2, 4),
            8,
            memory=2_000_000_000 + second * 10_000_000,
            free_memory=12_000_000_000 - second * 20_000_000,
            disk=dice.randrange(50_000_000),
            network=dice.randrange(400_000_000, 500_000_000),
        )


def _reports(rank: int, second: int, dice: random.Random) -> list[Report]:
    reports = []
    for i in range(STEPS):
        step = second * STEPS + i
        loss = 2 * math.exp(-step / 200) + dice.uniform(0, 0.1) + rank * 0.02
        accuracy = 1 - math.exp(-step / 150) - dice.uniform(0, 0.03)
        metrics = {"loss": loss, "accuracy": accuracy}
        reports.append(Report(rank, metrics, step, time=BEGAN + 4 + second))
    return reports


def run_under_way(size: int, seconds: int = 6, slow: int | None = None) -> Run:
    """A run under way, half a minute old; the slow rank computes while the others wait for it."""
    run = Run("3f9a1c7e", size, main="train", where="spark://master:7077")
    run.timings = Timings(time.time() - 30)
    run.attempts.append(Attempt(1, time.time() - 30))
    run.ranks = [RankInfo(rank, f"host-{rank // 8}", 4000 + rank, (), None) for rank in range(size)]
    run.profile.begin([info.host for info in run.ranks])
    for second in range(seconds):
        for rank in range(size):
            run.profile.add(window(rank, second, 0.0 if rank == slow else 0.4))
    for rank in range(size):
        run.profile.add_machine(
            Machine(rank, time.time(), 5.0, cores=13.25, of_cores=16, memory=2_000_000_000)
        )
    run._metrics.extend([Report(0, {"loss": 0.25}, step=341, total_steps=1200, epoch=2)], 1)
    run._lines.extend(Line(0.0, n % size, "stdout", f"line {n}\n") for n in range(30))
    return run


def window(rank: int, second: int, waiting: float) -> Profile:
    """A second of a rank: it waits for data for 0.2 s, and this long for other ranks."""
    waits = round(waiting / STEPS * 1e6)
    return Profile(
        rank,
        1000.0 + second,
        1.0,
        {"optimizer": STEPS},
        {"data": 0.2, "waiting": waiting, "moving": 0.05, "report": 0.01},
        collectives=STEPS,
        arrivals=[(second * STEPS + n, waits, 1_000_000 - n * 1000) for n in range(1, STEPS + 1)],
        cpu=1.5,
    )


def keep(run: Run, most_runs: int = 50) -> Path:
    """Write the record of a run as it is now, as a run itself does."""
    path = saved_run.new_path(run.run_id, most_runs)
    assert path is not None
    RunLog(run, path).close()
    return path
