"""Stores the reports of a run as columns, and makes the table ``runner.last_run.metrics``."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from horovod_runner.wire.events import MOST_LEFT_OUT, Report

if TYPE_CHECKING:
    import pyarrow as pa

# When a rank has more rows than this, every second row is dropped, and from then on every second
# report. Each further time the interval doubles.
MAX_ROWS: Final = 1 << 20
# Of all ranks: cells take 8 or 16 bytes. Above that the rank with the most is thinned out likewise.
MAX_CELLS: Final = 1 << 24
# Further metrics of a rank get no column.
MAX_METRICS: Final = 1 << 12


class _Array(array):  # type: ignore[type-arg]  # array[int] needs Python 3.12
    """Numbers of one type in memory, and their bytes in a file."""

    _code = "q"

    def __new__(cls, data: bytes = b"") -> Self:
        return super().__new__(cls, cls._code, data)


class Integers(_Array):
    """Of 64 bits."""


class ShortIntegers(_Array):
    """Of 32 bits."""

    _code = "i"


class Floats(_Array):
    """Of 64 bits."""

    _code = "d"


class _Cells(msgspec.Struct, array_like=True):
    """The values of one column.

    Attributes:
        rows: the row number of each value; None while value i is in row i.
    """

    values: Any
    rows: Integers | None = None

    def extend(self, first_row: int, values: list[Any]) -> None:
        """Add the values of consecutive rows; None marks a row without a value."""
        if None in values:
            pairs = [pair for pair in enumerate(values, first_row) if pair[1] is not None]
            self._row_numbers().fromlist([row for row, _ in pairs])
            values = [value for _, value in pairs]
        elif self.rows is not None or first_row != len(self.values):
            self._row_numbers().extend(range(first_row, first_row + len(values)))
        self.values.fromlist(values)

    def _row_numbers(self) -> Integers:
        if self.rows is None:
            self.rows = Integers()
            self.rows.extend(range(len(self.values)))
        return self.rows

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """Yield (row number, value) pairs."""
        rows = range(len(self.values)) if self.rows is None else self.rows
        return zip(rows, self.values, strict=True)

    def thin(self) -> None:
        """Keep only the values of even rows, and halve the row numbers."""
        if self.rows is None:
            del self.values[1::2]
            return
        kept = [(row >> 1, value) for row, value in self.numbered() if not row & 1]
        self.rows, self.values = Integers(), type(self.values)()
        self.rows.fromlist([row for row, _ in kept])
        self.values.fromlist([value for _, value in kept])


class IntegerCells(_Cells, array_like=True):
    """A column of integers."""

    values: Integers = msgspec.field(default_factory=Integers)


class FloatCells(_Cells, array_like=True):
    """A column of floats."""

    values: Floats = msgspec.field(default_factory=Floats)


class Position(NamedTuple):
    """How far a rank has come, as it last reported: None for what it has not said."""

    step: int | None = None
    epoch: int | None = None
    total_steps: int | None = None

    def after(self, reports: Sequence[Report]) -> Position:
        """The position after more reports."""

        def latest(name: str) -> Any:
            said = (getattr(report, name) for report in reversed(reports))
            return next((value for value in said if value is not None), getattr(self, name))

        return Position(*map(latest, self._fields))


class EpochEnd(NamedTuple):
    """The last report of an epoch.

    Attributes:
        time: of the call, in seconds since the Unix epoch, by the clock of the rank's host.
    """

    rank: int
    attempt: int
    epoch: int
    step: int | None
    time: float
    metrics: dict[str, float]


class MetricRows(msgspec.Struct):
    """The reports of one rank, in memory and in a file.

    Attributes:
        latest: the latest value of each metric, also from reports without a row.
        dropped: the number of reports without a row: the rank could not send them, or the table
            had too many rows.
        every: the number of each report that gets a row is a multiple of it; the first has 0.
    """

    rank: int
    latest: dict[str, float | int] = {}
    dropped: int = 0
    attempts: ShortIntegers = msgspec.field(default_factory=ShortIntegers)
    times: Floats = msgspec.field(default_factory=Floats)
    steps: IntegerCells = msgspec.field(default_factory=IntegerCells)
    epochs: IntegerCells = msgspec.field(default_factory=IntegerCells)
    columns: dict[str, FloatCells] = {}
    seen: int = 0
    every: int = 1
    position: Position = Position()

    def note(self, reports: Sequence[Report]) -> None:
        """Keep what stays known of reports that get no row."""
        for report in reports:
            self.dropped = min(self.dropped + report.left_out, MOST_LEFT_OUT)
            if len(self.latest) < MAX_METRICS:
                self.latest.update(report.metrics)
            else:
                known = report.metrics.keys() & self.latest.keys()
                self.latest.update({name: report.metrics[name] for name in known})
        self.position = self.position.after(reports)

    def extend(self, reports: Sequence[Report], attempt: int) -> None:
        """Add a row for each report."""
        row = len(self.times)
        self.attempts.fromlist([attempt] * len(reports))
        self.times.fromlist([report.time for report in reports])
        self.steps.extend(row, [report.step for report in reports])
        self.epochs.extend(row, [report.epoch for report in reports])
        all_metrics = [report.metrics for report in reports]
        for name in dict.fromkeys(chain.from_iterable(all_metrics)):
            column = self.columns.get(name)
            if column is None and len(self.columns) < MAX_METRICS:
                column = self.columns[sys.intern(name)] = FloatCells()
            if column is not None:
                column.extend(row, [metrics.get(name) for metrics in all_metrics])

    def cells(self) -> int:
        """The number of values, with those that every row has."""
        columns = (self.steps, self.epochs, *self.columns.values())
        return 2 * len(self.times) + sum([len(column.values) for column in columns])

    def thin(self) -> None:
        """Drop every second row."""
        before = len(self.times)
        del self.attempts[1::2], self.times[1::2]
        for column in (self.steps, self.epochs, *self.columns.values()):
            column.thin()
        self.dropped += before - len(self.times)
        self.every *= 2

    def epoch_ends(self) -> Iterator[EpochEnd]:
        """The last report of each epoch of each attempt."""
        last = {(self.attempts[row], epoch): row for row, epoch in self.epochs.numbered()}
        metrics: dict[int, dict[str, float]] = {row: {} for row in last.values()}
        for name, column in self.columns.items():
            for row, value in column.numbered():
                if row in metrics:
                    metrics[row][name] = value
        steps = dict(self.steps.numbered())
        for (attempt, epoch), row in last.items():
            where = (self.rank, attempt, epoch, steps.get(row), self.times[row])
            yield EpochEnd(*where, metrics[row])

    def points(self, name: str) -> Iterator[tuple[int, int | None, float]]:
        """The attempt, step and value of each row that has a metric."""
        steps = dict(self.steps.numbered())
        for row, value in self.columns[name].numbered():
            yield self.attempts[row], steps.get(row), value


class Metrics:
    """The reports of all ranks. One thread adds reports; any thread may read."""

    def __init__(
        self,
        max_rows: int = MAX_ROWS,
        max_cells: int = MAX_CELLS,
        rows: Collection[MetricRows] = (),
    ) -> None:
        self._max_rows = max_rows
        self._max_cells = max_cells
        self._lock = threading.Lock()
        self._ranks = {each.rank: each for each in rows}
        self._cells = {each.rank: each.cells() for each in rows}

    def extend(self, reports: Sequence[Report], attempt: int) -> None:
        """Add reports of one rank; at least one."""
        rank = reports[0].rank
        with self._lock:
            rows = self._ranks.get(rank)
            if rows is None:
                rows = self._ranks[rank] = MetricRows(rank)
            rows.note(reports)
            for start in range(0, len(reports), self._max_rows):
                part = reports[start : start + self._max_rows]
                # A rank's first report has number 0; multiples of `every` get a row.
                kept = part[-rows.seen % rows.every :: rows.every]
                rows.seen += len(part)
                rows.dropped += len(part) - len(kept)
                rows.extend(kept, attempt)
                while len(rows.times) > self._max_rows:
                    rows.thin()
            self._cells[rank] = rows.cells()
            self._thin_largest()

    def _thin_largest(self) -> None:
        """Drop every second row of the ranks with the most cells, until there is room."""
        while sum(self._cells.values()) > self._max_cells:
            # Of equal ones a later rank, because rank 0 is shown most.
            largest = max(self._cells, key=lambda rank: (self._cells[rank], rank))
            rows = self._ranks[largest]
            if len(rows.times) <= 1:
                return
            rows.thin()
            self._cells[largest] = rows.cells()

    @property
    def ranks(self) -> dict[int, MetricRows]:
        """The reports of each rank, by rank. They may grow meanwhile."""
        with self._lock:
            return dict(self._ranks)

    def epoch_ends(self) -> list[EpochEnd]:
        """The last report of each epoch of each rank and attempt, of those that name an epoch."""
        with self._lock:
            return [end for rows in self._ranks.values() for end in rows.epoch_ends()]

    def series(self, rank: int = 0) -> dict[str, list[tuple[int, int | None, float]]]:
        """Return a rank's (attempt, step, value) points by metric, in the order of arrival."""
        with self._lock:
            rows = self._ranks.get(rank)
            if rows is None:
                return {}
            return {name: list(rows.points(name)) for name in rows.columns}

    def table(self) -> pa.Table:
        """Return a table with a row per report, ordered by rank and arrival.

        Columns: rank (int32), attempt (int32), step (int64, may be null), epoch (int64, may be
        null), time (timestamp, UTC), and a float64 column per metric, null if the report lacks it.
        """
        import numpy as np
        import pyarrow as pa

        with self._lock:
            names = list(dict.fromkeys(n for rows in self._ranks.values() for n in rows.columns))
            tables = [
                _arrow_columns(np, pa, rows, names) for _, rows in sorted(self._ranks.items())
            ]
        schema = pa.schema(
            [
                ("rank", pa.int32()),
                ("attempt", pa.int32()),
                ("step", pa.int64()),
                ("epoch", pa.int64()),
                ("time", pa.timestamp("us", "UTC")),
                *((name, pa.float64()) for name in names),
            ]
        )
        return pa.concat_tables(
            [pa.Table.from_arrays(columns, schema=schema) for columns in tables]
            or [schema.empty_table()]
        )


def _arrow_columns(np: Any, pa: Any, rows: MetricRows, names: list[str]) -> list[Any]:
    def filled(column: _Cells | None, kind: Any) -> Any:
        values, missing = np.zeros(len(rows.times), kind), np.ones(len(rows.times), bool)
        if column is not None:
            present = slice(len(column.values)) if column.rows is None else np.array(column.rows)
            values[present], missing[present] = np.array(column.values, kind), False
        return pa.array(values, mask=missing)

    times = np.nan_to_num(np.array(rows.times, np.float64))
    micros = (times.clip(0, 2**33) * 1e6).astype(np.int64)
    return [
        pa.array(np.full(len(rows.times), rows.rank, np.int32)),
        pa.array(np.array(rows.attempts, np.int32)),
        filled(rows.steps, np.int64),
        filled(rows.epochs, np.int64),
        pa.array(micros, pa.timestamp("us", "UTC")),
        *(filled(rows.columns.get(name), np.float64) for name in names),
    ]
