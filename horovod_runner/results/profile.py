"""What the ranks have measured of themselves: ``runner.last_run.profile``.

Each rank sends a summary of about a second (``wire.measurements.Profile``). They are kept as rows,
and added up by rank.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec

from horovod_runner.results.flame import flame_graph
from horovod_runner.wire.measurements import Lines, Machine, Profile

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# A rank with more rows merges each two of them into one; and again, when there are as many again.
MAX_ROWS: Final = 3600
# Of all ranks together, above the fewest that a rank has.
_MAX_ALL_ROWS: Final = 100_000
_FEWEST_ROWS: Final = 60
_CLOCK_SAMPLES: Final = 100
# Collectives that some ranks have not told of yet.
_MAX_PENDING: Final = 10_000
#: Which count tells the steps of a training: the first of these that there is.
STEP_SOURCES: Final = ("optimizer", "batches", "reports", "reductions")
SPENT: Final = ("data", "waiting", "moving", "report", "checkpoint")


@dataclass
class RankTotals:
    """What a rank has measured in all.

    Attributes:
        seconds: the time that the summaries cover.
        steps: counts, by what was counted.
        spent: seconds of the main thread by kind.
        behind: seconds of the feed's threads by stage.
        cpu, main_cpu: CPU seconds of the process, and of its main thread.
        starved: seconds in which the main thread could have run and had no core.
        late: seconds by which the sampling thread ran too late.
        last: in how many of the compared collectives this rank was the last.
        lateness: seconds, over those, by which the median rank was earlier.
    """

    seconds: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    behind: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    collectives: int = 0
    waited: float = 0.0
    moved: float = 0.0
    cpu: float = 0.0
    main_cpu: float = 0.0
    starved: float = 0.0
    late: float = 0.0
    last: int = 0
    lateness: float = 0.0

    def add(self, profile: Profile) -> None:
        """Add a summary."""
        self.seconds += profile.seconds
        self.steps = _sum(self.steps, profile.steps)
        self.spent = _sum(self.spent, profile.spent)
        self.behind = _sum(self.behind, profile.behind)
        self.bytes += profile.bytes
        self.collectives += profile.collectives
        self.waited += profile.waited
        self.moved += profile.moved
        self.cpu += profile.cpu
        self.main_cpu += profile.main_cpu
        self.starved += profile.starved
        self.late += profile.late

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return steps_of(self.steps)


class SavedProfile(msgspec.Struct):
    """The profile of a run in a file."""

    rows: list[Profile]
    totals: dict[int, RankTotals]
    lines: list[Lines]
    machines: list[Machine]
    compared: int
    clock_offsets: dict[int, float]
    driver_ahead: float | None = None


class RunProfile:
    """The profile of a run. One thread adds to it; any thread may read.

    Attributes:
        compared: how many collectives were compared over all ranks.
    """

    def __init__(self) -> None:
        self._hosts: Sequence[str] = ()
        self._delays: dict[str, float] = {}
        self._driver_ahead: float | None = None  # from a file
        self._lock = threading.Lock()
        self._rows: dict[int, list[Profile]] = {}
        self._totals: dict[int, RankTotals] = {}
        self._lines: dict[int, Lines] = {}
        self._machines: dict[int, deque[Machine]] = {}
        self._last: Counter[int] = Counter()
        self._lateness: defaultdict[int, float] = defaultdict(float)
        self._pending: OrderedDict[int, dict[int, tuple[int, float]]] = OrderedDict()
        self._offsets: dict[int, deque[float]] = {}
        self.compared = 0

    def begin(self, hosts: Sequence[str]) -> None:
        """A new attempt: its collectives are counted from 1 again.

        Args:
            hosts: of the ranks, in their order.
        """
        with self._lock:
            self._hosts = hosts
            self._pending.clear()
            self._offsets.clear()

    def saved(self) -> SavedProfile:
        """All of it, for a file."""
        totals, offsets, ahead = self.totals, self.clock_offsets, self.driver_ahead
        with self._lock:
            return SavedProfile(
                [row for rows in self._rows.values() for row in rows],
                totals,
                list(self._lines.values()),
                [machine for machines in self._machines.values() for machine in machines],
                self.compared,
                offsets,
                ahead,
            )

    @classmethod
    def restored(cls, saved: SavedProfile) -> RunProfile:
        """The profile of a file; no more can be added."""
        profile = cls()
        for row in saved.rows:
            profile._rows.setdefault(row.rank, []).append(row)
        for rank, total in saved.totals.items():
            profile._totals[rank] = total
            profile._last[rank], profile._lateness[rank] = total.last, total.lateness
        for lines in saved.lines:
            profile.add_lines(lines)
        for machine in saved.machines:
            profile.add_machine(machine)
        for rank, offset in saved.clock_offsets.items():
            profile._offsets[rank] = deque([offset])
        profile._driver_ahead = saved.driver_ahead
        profile.compared = saved.compared
        return profile

    def _most_rows(self) -> int:
        """Of each rank; and of records of its host."""
        return min(MAX_ROWS, max(_FEWEST_ROWS, _MAX_ALL_ROWS // max(1, len(self._hosts))))

    def add(self, profile: Profile, now: float) -> None:
        """Add a summary of a rank, which arrived at the time ``now`` by the driver's clock."""
        with self._lock:
            host = self._host(profile.rank)
            self._delays[host] = min(self._delays.get(host, math.inf), now - profile.time)
            rows = self._rows.setdefault(profile.rank, [])
            if rows:  # the first one is from the time when everything was compiled and connected
                self._totals.setdefault(profile.rank, RankTotals()).add(profile)
            rows.append(msgspec.structs.replace(profile, arrivals=[]))
            if len(rows) > self._most_rows():
                rows[:] = merged(rows)
            for number, waited, age in profile.arrivals:
                self._arrived(profile.rank, number, waited, profile.time - age * 1e-6)

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if rank < len(self._hosts) else ""

    def _arrived(self, rank: int, number: int, waited: int, started: float) -> None:
        arrived = self._pending.setdefault(number, {})
        arrived[rank] = waited, started
        if len(arrived) == len(self._hosts):
            del self._pending[number]
            self._compare({rank: waited for rank, (waited, _) in arrived.items()})
            first = arrived.get(0, (0, started))[1]
            for each, (_, time) in arrived.items():
                self._offsets.setdefault(each, deque(maxlen=_CLOCK_SAMPLES)).append(time - first)
        elif len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def _compare(self, waits: dict[int, int]) -> None:
        """The rank that waited least was the last that all others waited for."""
        if len(waits) < 2:
            return
        ordered = sorted(waits.values())
        middle = ordered[len(ordered) // 2]
        last = min(waits, key=lambda rank: waits[rank])
        self._last[last] += 1
        self._lateness[last] += (middle - waits[last]) * 1e-6
        self.compared += 1

    @property
    def clock_offsets(self) -> dict[int, float]:
        """By rank, the seconds by which its host's clock is ahead of that of rank 0's host.

        A collective of Horovod starts on all ranks at the same moment, within the time that a
        message takes. Where none is known, the clocks are compared by how long messages to the
        driver take at least.
        """
        with self._lock:
            if self._offsets:
                return {rank: median(offsets) for rank, offsets in sorted(self._offsets.items())}
            return {rank: self._delay(0) - self._delay(rank) for rank in sorted(self._rows)}

    def _delay(self, rank: int) -> float:
        """The driver's clock minus that of a rank's host, and the time that a message takes."""
        return self._delays.get(self._host(rank), 0.0)

    @property
    def driver_ahead(self) -> float | None:
        """The seconds by which the driver's clock is ahead of that of rank 0's host.

        The number includes the time that the fastest message took from a rank to the driver, about
        a millisecond. In detached mode messages arrive at the end of the job, which may add
        seconds. None if no rank has sent a summary.
        """
        offsets = self.clock_offsets
        with self._lock:
            if not self._delays:
                return self._driver_ahead
            hosts = {self._host(rank): offset for rank, offset in offsets.items()}
            found = [delay + hosts[host] for host, delay in self._delays.items() if host in hosts]
            return min(found, default=None)

    @property
    def rows(self) -> dict[int, list[Profile]]:
        """The summaries of each rank, by rank, oldest first."""
        with self._lock:
            return {rank: list(found) for rank, found in sorted(self._rows.items())}

    def add_machine(self, machine: Machine) -> None:
        """Add what a rank's host did in some seconds."""
        with self._lock:
            machines = self._machines.setdefault(machine.rank, deque())
            machines.append(machine)
            if len(machines) > self._most_rows():
                machines.popleft()

    @property
    def machines(self) -> dict[int, list[Machine]]:
        """What the host of each rank did, by rank: a record for every five seconds."""
        with self._lock:
            return {rank: list(found) for rank, found in sorted(self._machines.items())}

    def add_lines(self, lines: Lines) -> None:
        """Replace the lines that a rank was seen at."""
        with self._lock:
            self._lines[lines.rank] = lines

    @property
    def totals(self) -> dict[int, RankTotals]:
        """What each rank has measured, by rank: without its first summary, if there are more."""
        with self._lock:
            found = {}
            for rank, rows in sorted(self._rows.items()):
                total = copy(self._totals.get(rank))
                if total is None:
                    total = RankTotals()
                    total.add(rows[0])
                total.last, total.lateness = self._last[rank], self._lateness[rank]
                found[rank] = total
            return found

    def table(self) -> pa.Table:
        """A row for each summary of each rank; requires pyarrow.

        Columns: rank, time, seconds, steps, data, waiting, moving, report, checkpoint (seconds of
        the main thread), compute (the rest), bytes and collectives, cpu (seconds).
        """
        import pyarrow as pa

        with self._lock:
            rows = [profile for rank in sorted(self._rows) for profile in self._rows[rank]]
        columns: dict[str, list[float]] = {
            "rank": [row.rank for row in rows],
            "time": [row.time for row in rows],
            "seconds": [row.seconds for row in rows],
            "steps": [steps_of(row.steps) for row in rows],
        }
        for name in SPENT:
            columns[name] = [row.spent.get(name, 0.0) for row in rows]
        columns["compute"] = [max(0.0, r.seconds - sum(r.spent.values())) for r in rows]
        columns["bytes"] = [row.bytes for row in rows]
        columns["collectives"] = [row.collectives for row in rows]
        columns["cpu"] = [row.cpu for row in rows]
        return pa.table(columns)

    def to_pandas(self) -> pd.DataFrame:
        """:meth:`table` as a pandas DataFrame."""
        return self.table().to_pandas()

    def lines(self, rank: int) -> list[tuple[tuple[str, ...], float]]:
        """The stacks that a rank's main thread was seen at, and the share of each; most first.

        A stack is a tuple of calls, "file:line function", the outermost first.
        """
        with self._lock:
            lines = self._lines.get(rank)
        if lines is None or not lines.looks:
            return []
        calls = [_call(text) for text in lines.calls]
        return [
            (tuple(calls[number] for number in stack), count / lines.looks)
            for stack, count in zip(lines.stacks, lines.counts, strict=True)
        ]

    def flame(self, rank: int = 0, path: str | os.PathLike[str] | None = None) -> str:
        """Draw where a rank's main thread was seen as a flame graph.

        Args:
            rank: the rank's number.
            path: also write the SVG to this file.

        Returns:
            The text of the SVG, which a notebook shows by ``IPython.display.SVG(text)``.

        Raises:
            ValueError: nothing is known of this rank.
        """
        stacks = self.lines(rank)
        if not stacks:
            raise ValueError(
                f"rank {rank} has sent no lines: it ran for less than a second, there is no such "
                "rank, or the run had DebugConfig(profile=False)"
            )
        text = flame_graph(stacks, f"rank {rank}: lines of the main thread")
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def steps_of(steps: dict[str, int]) -> int:
    """The number of steps in a summary."""
    return next((steps[name] for name in STEP_SOURCES if steps.get(name)), 0)


def merged(rows: Iterable[Profile]) -> Iterator[Profile]:
    """Merge each two rows into one."""
    pairs = iter(rows)
    for first in pairs:
        second = next(pairs, None)
        if second is None:
            yield first
            return
        yield msgspec.structs.replace(
            second,
            seconds=first.seconds + second.seconds,
            steps=_sum(first.steps, second.steps),
            spent=_sum(first.spent, second.spent),
            behind=_sum(first.behind, second.behind),
            bytes=first.bytes + second.bytes,
            collectives=first.collectives + second.collectives,
            waited=first.waited + second.waited,
            moved=first.moved + second.moved,
            cpu=first.cpu + second.cpu,
            main_cpu=first.main_cpu + second.main_cpu,
            starved=first.starved + second.starved,
            late=first.late + second.late,
        )


def _sum(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def _call(text: str) -> str:
    file, function, line = text.split("\0")
    return f"{file}:{line} {function}"
