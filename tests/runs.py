"""Makes records of runs that never were, for what draws runs."""

from __future__ import annotations

import time

from horovod_runner.results.run import Attempt, Line, Run, Timings
from horovod_runner.wire.measurements import Machine, Profile
from horovod_runner.wire.messages import Report
from horovod_runner.wire.slots import RankInfo

STEPS = 10  # of a rank in a second


def make_run(size: int, seconds: int = 6, slow: int | None = None) -> Run:
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
