"""What the ranks have measured of themselves: ``runner.last_run.profile``.

Each rank sends a summary of about a second (``wire.measurements.Profile``). They are kept as rows,
and added up by rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from horovod_runner.results.slowness.comparison import Comparison
from horovod_runner.results.slowness.flame import flame_graph
from horovod_runner.results.slowness.machines import Machines
from horovod_runner.results.slowness.totals import SPENT, RankTotals, merged, spent_of
from horovod_runner.wire.measurements import Lines, Machine, Profile, Thread, steps_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# A rank with more rows merges each two of them into one; and again, when there are as many again.
MAX_ROWS: Final = 3600
# Of all ranks together, above the fewest that a rank has.
_MAX_ALL_ROWS: Final = 100_000
_FEWEST_ROWS: Final = 60
_SLOW_START: Final = 0.5  # of the usual steps per second; below is warm-up
_RECENT_ROWS: Final = 60


class SavedProfile(msgspec.Struct):
    """The profile of a run in a file."""

    hosts: list[str]
    rows: list[Profile]
    totals: dict[int, RankTotals]
    lines: list[Lines]
    machines: list[Machine]
    compared: int
    clock_offsets: dict[int, float]
    driver_ahead: float | None = None
    heard: dict[int, float] = {}


class Recent(NamedTuple):
    """What was last heard of a rank."""

    rows: list[Profile]
    heard: float
    machine: Machine | None


class RunProfile:
    """The profile of a run. One thread adds to it; any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, list[Profile]] = {}
        self._heard: dict[int, float] = {}
        self._totals: dict[int, RankTotals] = {}
        self._comparison = Comparison(self._totals)
        self._lines: dict[tuple[int, Thread], Lines] = {}
        self._machines = Machines()

    def begin(self, hosts: Sequence[str]) -> None:
        """A new attempt: its collectives are counted from 1 again."""
        with self._lock:
            self._comparison.begin(hosts)
            self._machines.begin()

    def saved(self) -> SavedProfile:
        """All of it, for a file."""
        offsets, ahead = self.clock_offsets, self.driver_ahead
        with self._lock:
            return SavedProfile(
                list(self._comparison.hosts),
                [row for rows in self._rows.values() for row in rows],
                {rank: copy(total) for rank, total in self._totals.items()},
                list(self._lines.values()),
                self._machines.all(),
                self.compared,
                offsets,
                ahead,
                dict(self._heard),
            )

    @classmethod
    def restored(cls, saved: SavedProfile) -> RunProfile:
        """The profile of a file; more can be added."""
        profile = cls()
        profile.begin(saved.hosts)
        for row in saved.rows:
            profile._rows.setdefault(row.rank, []).append(row)
        profile._totals.update(saved.totals)
        profile._heard.update(saved.heard)
        for lines in saved.lines:
            profile.add_lines(lines)
        profile._machines = Machines.restored(saved.machines)
        profile._comparison.restore(saved.compared, saved.clock_offsets, saved.driver_ahead)
        return profile

    def _most_rows(self) -> int:
        """The limit of rows of each rank, and of measurements of its machine."""
        return min(
            MAX_ROWS, max(_FEWEST_ROWS, _MAX_ALL_ROWS // max(1, len(self._comparison.hosts)))
        )

    def add(self, profile: Profile, now: float | None = None) -> None:
        """Add a summary of a rank."""
        now = time.time() if now is None else now
        with self._lock:
            rows = self._rows.setdefault(profile.rank, [])
            self._totals.setdefault(profile.rank, RankTotals()).add(profile)
            rows.append(msgspec.structs.replace(profile, arrivals=[]))
            self._heard[profile.rank] = now
            if len(rows) > self._most_rows():
                rows[:] = merged(rows)
            self._comparison.add(profile, now)

    @property
    def compared(self) -> int:
        """How many collectives were compared over all ranks."""
        return self._comparison.compared

    @property
    def clock_offsets(self) -> dict[int, float]:
        """By rank, the seconds by which its host's clock is ahead of that of rank 0's host.

        A collective of Horovod starts on all ranks at the same moment, within the time that a
        message takes. Where none is known, the clocks are compared by how long messages to the
        driver take at least.
        """
        with self._lock:
            return self._comparison.clock_offsets()

    @property
    def driver_ahead(self) -> float | None:
        """The seconds by which the driver's clock is ahead of that of rank 0's host.

        The number includes the time that the fastest message took from a rank to the driver, about
        a millisecond. In detached mode messages arrive at the end of the job, which may add
        seconds. None if no rank has sent a summary.
        """
        with self._lock:
            return self._comparison.driver_ahead()

    @property
    def rows(self) -> dict[int, list[Profile]]:
        """The summaries of each rank, by rank, in the order of time."""
        with self._lock:
            return {rank: list(rows) for rank, rows in sorted(self._rows.items())}

    def recent(self) -> dict[int, Recent]:
        """What was last heard of each rank, by rank; cheap enough for every second."""
        with self._lock:
            machines = self._machines.latest()
            return {
                rank: Recent(
                    self._rows.get(rank, [])[-_RECENT_ROWS:],
                    self._heard.get(rank, 0.0),
                    machines.get(rank),
                )
                for rank in self._rows.keys() | machines.keys()
            }

    def steps(self, rank: int) -> int:
        """How many steps a rank has counted, over all attempts."""
        with self._lock:
            # Not the sum of each summary's: one of the first seconds may have reductions alone.
            return self._totals.get(rank, RankTotals()).step_count

    def add_machine(self, machine: Machine) -> None:
        """Add what a rank's host and processes did in some seconds."""
        with self._lock:
            self._machines.add(machine, self._most_rows())

    @property
    def machines(self) -> dict[int, list[Machine]]:
        """What the host of each rank did, by rank: a record for every five seconds."""
        with self._lock:
            return self._machines.by_rank()

    def add_lines(self, lines: Lines) -> None:
        """Replace the lines that a rank was seen at."""
        with self._lock:
            self._lines[lines.rank, lines.thread] = lines

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        with self._lock:
            return dict(enumerate(self._comparison.hosts))

    @property
    def totals(self) -> dict[int, RankTotals]:
        """What each rank has measured, by rank: without its warm-up, see :attr:`warm_up`."""
        with self._lock:
            warm = self._warm_up_rows()
            found = {}
            for rank, rows in sorted(self._rows.items()):
                found[rank] = copy(self._totals[rank])
                for row in rows[:warm]:
                    found[rank].add(row, sign=-1)
            return found

    @property
    def warm_up(self) -> RankTotals:
        """What one rank measured before it reached its usual pace.

        Of all ranks, it is the one that waited longest for data in that time.

        The first summary counts among it in any case: its time is that of the first steps.
        """
        total = RankTotals()
        with self._lock:
            warm = self._warm_up_rows()
            begins = [rows[:warm] for rows in self._rows.values()]
            for row in max(begins, key=_waited_for_data, default=[]):
                total.add(row)
        return total

    def _warm_up_rows(self) -> int:
        """How many summaries at the begin of each rank are of its warm-up; not all of them."""
        rows = min(self._rows.values(), key=len, default=[])
        if len(rows) < 2:
            return 0
        rates = [steps_of(row.steps) / row.seconds for row in rows]
        usual = median(rates[len(rates) // 2 :])
        most = max(1, len(rows) // 2)
        slow = next((n for n, rate in enumerate(rates) if rate > usual * _SLOW_START), 0)
        return min(most, max(1, slow))

    def table(self) -> pa.Table:
        """:meth:`columns` as a table; requires pyarrow."""
        import pyarrow as pa

        return pa.table(self.columns())

    def to_pandas(self) -> pd.DataFrame:
        """:meth:`columns` as a pandas DataFrame."""
        return self.table().to_pandas()

    def machine_table(self) -> pa.Table:
        """:meth:`machine_columns` as a table; requires pyarrow."""
        import pyarrow as pa

        return pa.table(self.machine_columns())

    def machines_to_pandas(self) -> pd.DataFrame:
        """:meth:`machine_columns` as a pandas DataFrame."""
        return self.machine_table().to_pandas()

    def machine_columns(self) -> dict[str, list[float]]:
        """A value for each measurement of the machine under each rank, by column.

        The columns are the attributes of ``wire.measurements.Machine``: rank, time, seconds, cores
        (of the host, busy), of_cores, own_cores, other_cores, memory (bytes) and so on.
        """
        with self._lock:
            rows = self._machines.all()
        return {name: [getattr(row, name) for row in rows] for name in Machine.__struct_fields__}

    def columns(self) -> dict[str, list[float]]:
        """A value for each summary of each rank, by column.

        Columns: rank, time, seconds, steps, data, waiting, moving, report, checkpoint (seconds of
        the main thread), compute (the rest), bytes and collectives, cpu (seconds).
        """
        with self._lock:
            rows = [profile for rank in sorted(self._rows) for profile in self._rows[rank]]
        columns: dict[str, list[float]] = {
            name: [getattr(row, name) for row in rows] for name in ("rank", "time", "seconds")
        }
        columns["steps"] = [steps_of(row.steps) for row in rows]
        spent = [spent_of(row) for row in rows]
        columns |= {name: [each[name] for each in spent] for name in SPENT}
        columns["compute"] = [max(0.0, r.seconds - sum(r.spent.values())) for r in rows]
        rest = ("bytes", "collectives", "cpu")
        return columns | {name: [getattr(row, name) for row in rows] for name in rest}

    def lines(self, rank: int, thread: Thread = "main") -> list[tuple[tuple[str, ...], float]]:
        """The stacks that a rank was seen at, and the share of each; most first.

        Args:
            rank: the rank's number.
            thread: "main": of its main thread; "loader": of its DataLoader's processes; "others":
                of its other threads while the interpreter lock was not free.

        A stack is a tuple of calls, "file:line function", the outermost first.
        """
        with self._lock:
            lines = self._lines.get((rank, thread))
        if lines is None or not lines.total:
            return []
        calls = [_call(text) for text in lines.calls]
        return [
            (tuple(calls[number] for number in stack), count / lines.total)
            for stack, count in zip(lines.stacks, lines.counts, strict=True)
        ]

    def flame(
        self,
        rank: int = 0,
        path: str | os.PathLike[str] | None = None,
        *,
        thread: Thread = "main",
    ) -> str:
        """Draw where a rank was seen as a flame graph.

        Args:
            rank: the rank's number.
            thread: "main": its main thread; "loader": the processes of its DataLoader.
            path: also write the SVG to this file.

        Returns:
            The text of the SVG, which a notebook shows by ``IPython.display.SVG(text)``.

        Raises:
            ValueError: nothing is known of this rank.
        """
        stacks = self.lines(rank, thread)
        if not stacks:
            raise ValueError(
                f"rank {rank} has sent no lines: it ran for less than a second, there is no such "
                "rank, or the run had DebugConfig(profile=False)"
            )
        of = "the main thread" if thread == "main" else "the DataLoader's processes"
        text = flame_graph(stacks, f"rank {rank}: lines of {of}")
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def _waited_for_data(rows: Sequence[Profile]) -> float:
    return sum(row.spent.get("data", 0.0) for row in rows)


def _call(text: str) -> str:
    file, function, line = text.split("\0")
    return f"{file}:{line} {function}"
