"""The time line of a trace: microseconds since its first event, by the clock of rank 0's host.

Summaries, reports, checkpoints and traces of frameworks have times of the rank's host. Attempts,
notices and printed lines have times of the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from horovod_runner.common.slots import RankInfo

if TYPE_CHECKING:
    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.results.run import Run


class Clocks:
    """Places moments of all clocks on the time line.

    Others are further moments of it: a rank, and seconds since the Unix epoch by its host's clock.

    Attributes:
        zero: the start of the time line, in seconds since the Unix epoch by rank 0's clock.
        offsets: by rank, the seconds by which its clock is ahead of rank 0's.
        driver_ahead: the seconds by which the driver's clock is ahead; None if it is not known.
    """

    def __init__(self, run: Run, others: Iterable[tuple[int, float]] = ()) -> None:
        self.offsets = _by_host(run.profile.clock_offsets, run.ranks)
        self.driver_ahead = run.profile.driver_ahead
        self.zero = 0.0
        moments = [self.by_driver(run.timings.queued)]
        moments += [self.by_rank(rank, seconds) for rank, seconds in others]
        for rank, rows in run.profile.rows.items():
            moments += [self.by_rank(rank, row.time - row.seconds) for row in rows[:1]]
        for rank, machines in run.profile.machines.items():
            moments += [self.by_rank(rank, each.time - each.seconds) for each in machines[:1]]
        moments += [self.by_rank(end.rank, end.time) for end in run._metrics.epoch_ends()]
        moments += [self.by_rank(0, each.saved_at) for each in own_checkpoints(run)]
        # A microsecond earlier: seconds since the epoch are not exact enough for less.
        self.zero = min(moments) * 1e-6 - 1e-6

    def by_rank(self, rank: int, seconds: float) -> float:
        """Place a moment by the clock of a rank's host, in seconds since the Unix epoch."""
        return (seconds - self.offsets.get(rank, 0.0) - self.zero) * 1e6

    def by_driver(self, seconds: float) -> float:
        """Place a moment by the driver's clock, in seconds since the Unix epoch."""
        return (seconds - (self.driver_ahead or 0.0) - self.zero) * 1e6


def own_checkpoints(run: Run) -> list[Checkpoint]:
    """The checkpoints that a run has saved, without those of the runs that it resumes."""
    return [each for each in run.checkpoints if each.marker.run_id == run.run_id]


def _by_host(offsets: dict[int, float], ranks: Iterable[RankInfo]) -> dict[int, float]:
    """Give all ranks of a host the median of their offsets, because they share its clock."""
    hosts: dict[int, int | str] = {rank: rank for rank in offsets}
    hosts |= {rank.rank: rank.host for rank in ranks}
    by_host: dict[int | str, list[float]] = {}
    for rank, offset in offsets.items():
        by_host.setdefault(hosts[rank], []).append(offset)
    by_host[hosts.get(0, 0)] = [0.0]
    return {rank: median(by_host[hosts[rank]]) for rank in offsets}
