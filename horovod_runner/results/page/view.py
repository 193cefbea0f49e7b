"""What all sections of the page show: a run, and what is computed of it once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from horovod_runner.results.run import Run
from horovod_runner.results.slowness.case import step_of
from horovod_runner.results.slowness.diagnosis import Diagnosis
from horovod_runner.results.slowness.totals import SPENT, RankTotals
from horovod_runner.wire.measurements import Profile

#: Of Okabe and Ito, for colour-blind people: blue, orange, green, red, sky, purple.
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
#: The kinds of a rank's time: their names in the profile, in words, and their colours.
KINDS: Final = (
    ("compute", "compute", COLOURS[0]),
    ("data", "wait for data", COLOURS[1]),
    ("waiting", "wait for the slowest rank", COLOURS[3]),
    ("moving", "reduce", COLOURS[4]),
    ("report", "report", COLOURS[2]),
    ("checkpoint", "checkpoint", COLOURS[5]),
)


class TimePart(NamedTuple):
    """A part of a bar: its colour, its name and its size."""

    colour: str
    name: str
    value: float


@dataclass(frozen=True)
class View:
    """A run as the page shows it.

    Attributes:
        status: as :attr:`Run.status`, or "lost".
        remark: a sentence about the status; empty for a run that has ended.
        end: when the run ended, or until when it is known; seconds since the epoch.
    """

    run: Run
    status: str
    remark: str
    end: float

    @cached_property
    def found(self) -> Diagnosis:
        """Why the run is slow."""
        return self.run.diagnose()

    @cached_property
    def rows(self) -> dict[int, list[Profile]]:
        """The measurements of each rank."""
        return self.run.profile.rows

    @cached_property
    def totals(self) -> dict[int, RankTotals]:
        """What each rank has measured in all."""
        return self.run.profile.totals

    @cached_property
    def _waiting_shares(self) -> dict[int, float]:
        """By rank, the share of waiting for other ranks in the time blocked in collectives."""
        compared, found = self.run.profile.compared, {}
        for rank, total in self.totals.items():
            if total.spent.get("blocked") and total.step_count and compared:
                step = step_of(total, compared)
                found[rank] = step.waiting / max(step.waiting + step.moving, 1e-12)
        return found

    def spent(self, rank: int, spent: Mapping[str, float]) -> dict[str, float]:
        """Divide the time that a rank was blocked in collectives into waiting and moving.

        Horovod's collectives are measured so; of others the sum is known, and how long the rank
        waited in all.
        """
        found = {name: spent.get(name, 0.0) for name in SPENT}
        share = self._waiting_shares.get(rank)
        if share is not None:
            found["waiting"] += share * spent.get("blocked", 0.0)
            found["moving"] += (1 - share) * spent.get("blocked", 0.0)
        return found

    @cached_property
    def offsets(self) -> dict[int, float]:
        """By how much the clocks of the ranks' hosts are ahead."""
        return self.run.profile.clock_offsets

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return {info.rank: info.host for info in self.run.ranks}

    @cached_property
    def by_host(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank, host in self.hosts.items():
            found.setdefault(host, []).append(rank)
        return found

    @cached_property
    def suspect(self) -> int | None:
        """The rank that the verdict names first; None if it names none."""
        return next((each.rank for each in self.found.findings if each.rank is not None), None)

    def name(self, rank: int) -> str:
        """A rank, and its host where there are several."""
        several = len(self.by_host) > 1 and rank in self.hosts
        host = f" · {self.hosts[rank]}" if several else ""
        return f"rank {rank}{host}"
