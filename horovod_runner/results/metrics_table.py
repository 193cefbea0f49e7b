"""Stores the reports of a run as columns, and makes the table ``runner.last_run.metrics``."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from horovod_runner.wire.events import Report

if TYPE_CHECKING:
    import pyarrow as pa

# When a rank has more rows than this, every second row is dropped, and from then on every second
# report. Each further time the interval doubles.
MAX_ROWS: Final = 1 << 20
# Of all ranks: cells take 8 or 16 bytes. Above that the rank with the most is thinned out likewise.
MAX_CELLS: Final = 1 << 24
# Further metrics of a rank get no column.
MAX_METRICS: Final = 1 << 12


class Cells(msgspec.Struct, array_like=True):
    """A column in a file, see :class:`_Column`: arrays as bytes."""

    values: bytes
    rows: bytes | None


class MetricRows(msgspec.Struct):
    """The reports of one rank in a file."""

    rank: int
    latest: dict[str, float | int]
    dropped: int
    attempts: bytes
    times: bytes
    steps: Cells
    epochs: Cells
    columns: dict[str, Cells]
    seen: int
    every: int
    position: Position


class Position(NamedTuple):
    """How far a rank has come, as it last reported: None for what it has not said."""

    step: int | None = None
    epoch: int | None = None
    total_steps: int | None = None

    def after(self, reports: Sequence[Report]) -> Position:
        """The position after more reports."""
        return Position(
            next((r.step for r in reversed(reports) if r.step is not None), self.step),
            next((r.epoch for r in reversed(reports) if r.epoch is not None), self.epoch),
            next(
                (r.total_steps for r in reversed(reports) if r.total_steps is not None),
                self.total_steps,
            ),
        )


class EpochEnd(NamedTuple):
    """The last report of an epoch.

    Attributes:
        step: None if the report had none.
        time: of the call, in seconds since the Unix epoch, by the clock of the rank's host.
    """

    rank: int
    attempt: int
    epoch: int
    step: int | None
    time: float
    metrics: dict[str, float]


class Metrics:
    """The reports of all ranks. One thread adds reports; any thread may read.

    Attributes:
        latest: by rank, the latest value of each metric, also from reports without a row.
        positions: by rank, how far it has come.
        dropped: by rank, the number of reports without a row: the rank could not send them, or the
            table had too many rows.
    """

    def __init__(self, max_rows: int = MAX_ROWS, max_cells: int = MAX_CELLS) -> None:
        self._max_rows = max_rows
        self._max_cells = max_cells
        self._cells: dict[int, int] = {}  # by rank
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rows] = {}
        self.latest: dict[int, dict[str, float | int]] = {}
        self.positions: dict[int, Position] = {}
        self.dropped: dict[int, int] = {}

    def extend(self, reports: Sequence[Report], attempt: int) -> None:
        """Add reports of one rank; at least one."""
        rank = reports[0].rank
        with self._lock:
            rows = self._ranks.get(rank)
            if rows is None:
                rows = self._ranks[rank] = _Rows()
                self.latest[rank] = {}
                self.dropped[rank] = 0
            latest = self.latest[rank]
            for report in reports:
                if len(latest) < MAX_METRICS:
                    latest.update(report.metrics)
                else:
                    known = report.metrics.keys() & latest.keys()
                    latest.update({name: report.metrics[name] for name in known})
            self.positions[rank] = self.positions.get(rank, Position()).after(reports)
            dropped = sum([report.left_out for report in reports])
            for start in range(0, len(reports), self._max_rows):
                part = reports[start : start + self._max_rows]
                # A rank's first report has number 0; multiples of `every` get a row.
                kept = part[-rows.seen % rows.every :: rows.every]
                rows.seen += len(part)
                dropped += len(part) - len(kept)
                rows.extend(kept, attempt)
                while rows.count > self._max_rows:
                    dropped += rows.thin()
            self.dropped[rank] += dropped
            self._cells[rank] = rows.cells()
            self._thin_largest()

    def _thin_largest(self) -> None:
        """Drop every second row of the ranks with the most cells, until there is room."""
        while sum(self._cells.values()) > self._max_cells:
            # Of equal ones a later rank, because rank 0 is shown most.
            largest = max(self._cells, key=lambda rank: (self._cells[rank], rank))
            rows = self._ranks[largest]
            if rows.count <= 1:
                return
            self.dropped[largest] += rows.thin()
            self._cells[largest] = rows.cells()

    def saved(self) -> list[MetricRows]:
        """All rows, for a file."""
        with self._lock:
            return [
                MetricRows(
                    rank,
                    dict(self.latest[rank]),
                    self.dropped[rank],
                    rows.attempts.tobytes(),
                    rows.times.tobytes(),
                    rows.steps.saved(),
                    rows.epochs.saved(),
                    {name: column.saved() for name, column in rows.columns.items()},
                    rows.seen,
                    rows.every,
                    self.positions.get(rank, Position()),
                )
                for rank, rows in self._ranks.items()
            ]

    @classmethod
    def restored(cls, saved: Sequence[MetricRows]) -> Metrics:
        """The metrics of a file; more can be added."""
        metrics = cls()
        for each in saved:
            metrics.latest[each.rank], metrics.dropped[each.rank] = each.latest, each.dropped
            rows = metrics._ranks[each.rank] = _Rows()
            rows.attempts.frombytes(each.attempts)
            rows.times.frombytes(each.times)
            rows.count = len(rows.times)
            rows.steps, rows.epochs = _Column("q", each.steps), _Column("q", each.epochs)
            rows.columns = {name: _Column("d", cells) for name, cells in each.columns.items()}
            rows.seen, rows.every = each.seen, each.every
            metrics.positions[each.rank] = each.position
            metrics._cells[each.rank] = rows.cells()
        return metrics

    def __len__(self) -> int:
        with self._lock:
            return sum(rows.count for rows in self._ranks.values())

    def epoch_ends(self) -> list[EpochEnd]:
        """The last report of each epoch of each rank and attempt, of those that name an epoch."""
        with self._lock:
            return [end for rank, rows in self._ranks.items() for end in rows.epoch_ends(rank)]

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

        tables = []
        with self._lock:
            names = list(dict.fromkeys(n for rows in self._ranks.values() for n in rows.columns))
            for rank in sorted(self._ranks):
                tables.append(_arrow_columns(np, pa, rank, self._ranks[rank], names))
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


class _Column:
    """The values of one column.

    Attributes:
        values: the values, in the order of rows.
        rows: the row number of each value; None while value i is in row i.
    """

    def __init__(self, code: str, saved: Cells | None = None) -> None:
        self.values = array(code, b"" if saved is None else saved.values)
        self.rows: array[int] | None = None
        if saved is not None and saved.rows is not None:
            self.rows = array("q", saved.rows)

    def saved(self) -> Cells:
        """This column for a file."""
        return Cells(self.values.tobytes(), None if self.rows is None else self.rows.tobytes())

    def extend(self, first_row: int, values: list[Any]) -> None:
        """Add the values of consecutive rows; None marks a row without a value."""
        if None in values:
            pairs = [pair for pair in enumerate(values, first_row) if pair[1] is not None]
            self._row_numbers().fromlist([row for row, _ in pairs])
            values = [value for _, value in pairs]
        elif self.rows is not None or first_row != len(self.values):
            self._row_numbers().extend(range(first_row, first_row + len(values)))
        self.values.fromlist(values)

    def _row_numbers(self) -> array[int]:
        if self.rows is None:
            self.rows = array("q", range(len(self.values)))
        return self.rows

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """Yield (row number, value) pairs."""
        rows = range(len(self.values)) if self.rows is None else self.rows
        return zip(rows, self.values, strict=True)

    def thin(self) -> None:
        """Keep only the values of even rows, and halve the row numbers."""
        if self.rows is None:
            self.values = self.values[::2]
            return
        kept = [(row >> 1, value) for row, value in self.numbered() if not row & 1]
        self.rows = array("q", [row for row, _ in kept])
        self.values = array(self.values.typecode, [value for _, value in kept])


class _Rows:
    """The reports of one rank."""

    def __init__(self) -> None:
        self.seen = 0
        self.every = 1
        self.count = 0
        self.attempts = array("i")
        self.times = array("d")
        self.steps = _Column("q")
        self.epochs = _Column("q")
        self.columns: dict[str, _Column] = {}

    def extend(self, reports: Sequence[Report], attempt: int) -> None:
        row = self.count
        self.count += len(reports)
        self.attempts.fromlist([attempt] * len(reports))
        self.times.fromlist([report.time for report in reports])
        self.steps.extend(row, [report.step for report in reports])
        self.epochs.extend(row, [report.epoch for report in reports])
        all_metrics = [report.metrics for report in reports]
        for name in dict.fromkeys(chain.from_iterable(all_metrics)):
            column = self.columns.get(name)
            if column is None and len(self.columns) < MAX_METRICS:
                column = self.columns[sys.intern(name)] = _Column("d")
            if column is not None:
                column.extend(row, [metrics.get(name) for metrics in all_metrics])

    def cells(self) -> int:
        """The number of values, with those that every row has."""
        columns = (self.steps, self.epochs, *self.columns.values())
        return 2 * self.count + sum([len(column.values) for column in columns])

    def thin(self) -> int:
        """Drop every second row; returns the number of dropped rows."""
        before = self.count
        self.attempts, self.times = self.attempts[::2], self.times[::2]
        for column in (self.steps, self.epochs, *self.columns.values()):
            column.thin()
        self.count = len(self.times)
        self.every *= 2
        return before - self.count

    def epoch_ends(self, rank: int) -> Iterator[EpochEnd]:
        last = {(self.attempts[row], epoch): row for row, epoch in self.epochs.numbered()}
        metrics: dict[int, dict[str, float]] = {row: {} for row in last.values()}
        for name, column in self.columns.items():
            for row, value in column.numbered():
                if row in metrics:
                    metrics[row][name] = value
        steps = dict(self.steps.numbered())
        for (attempt, epoch), row in last.items():
            yield EpochEnd(rank, attempt, epoch, steps.get(row), self.times[row], metrics[row])

    def points(self, name: str) -> Iterator[tuple[int, int | None, float]]:
        steps = dict(self.steps.numbered())
        for row, value in self.columns[name].numbered():
            yield self.attempts[row], steps.get(row), value


def _arrow_columns(np: Any, pa: Any, rank: int, rows: _Rows, names: list[str]) -> list[Any]:
    def filled(column: _Column | None, kind: Any) -> Any:
        values, missing = np.zeros(rows.count, kind), np.ones(rows.count, bool)
        if column is not None:
            present = slice(len(column.values)) if column.rows is None else np.array(column.rows)
            values[present], missing[present] = np.array(column.values, kind), False
        return pa.array(values, mask=missing)

    times = np.nan_to_num(np.array(rows.times, np.float64))
    micros = (times.clip(0, 2**33) * 1e6).astype(np.int64)
    return [
        pa.array(np.full(rows.count, rank, np.int32)),
        pa.array(np.array(rows.attempts, np.int32)),
        filled(rows.steps, np.int64),
        filled(rows.epochs, np.int64),
        pa.array(micros, pa.timestamp("us", "UTC")),
        *(filled(rows.columns.get(name), np.float64) for name in names),
    ]
