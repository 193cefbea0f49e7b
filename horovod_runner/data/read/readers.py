"""Readers: datasets as they are sent to the ranks; those of tables and of packed pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from horovod_runner.common.text import has_password
from horovod_runner.data.pack import arrow_rows
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack.columns import Column, Columns, Rows
from horovod_runner.data.pack.layout import Chunk, Layout, pack
from horovod_runner.data.pack.store import PackedStore
from horovod_runner.errors import DataError

#: File in a piece's store with the columns that are kept as they came.
RAW: Final = "raw.arrow"


@contextmanager
def name_in_errors(name: str) -> Iterator[None]:
    """Prefix the errors of a block with the dataset's name."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error.__cause__
    except Exception as error:
        if not has_password(str(error)):
            raise
        # A store's, which quotes the URL.
        raise DataError(f"{name}: {type(error).__name__}: {error}") from None


def twins(names: Iterable[str]) -> dict[str, str]:
    """Why columns with the same name cannot be used, by name."""
    counts = Counter(names)
    return {
        name: f"two columns are called {name!r}: rename one"
        for name, count in counts.items()
        if count > 1
    }


class Reader(Protocol):
    """A dataset that ranks can read; pickled on the driver."""

    @property
    def units(self) -> list[int]:
        """Rows of each unit, a part that can be read by itself."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data."""

    @property
    def columns(self) -> Columns:
        """The columns, by name."""

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed: a list may turn out to be a vector.

        Raises:
            DataError: the data lack a column, or a column cannot become a tensor.
        """

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a unit, packed."""


@dataclass(frozen=True, kw_only=True)
class ArrowReader(ABC):
    """A reader that yields Arrow record batches."""

    schema: pa.Schema
    units: list[int]
    fingerprint: str
    fill_null: Mapping[str, Any] = field(default_factory=dict)  # what replaces nulls, by column
    ragged: Sequence[str] = ()  # lists that stay lists, even if their first rows have one length

    @abstractmethod
    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit, some thousand at a time."""

    @property
    def columns(self) -> Columns:
        """The columns, by name."""
        return column_types.columns_of(self.schema)

    def settle(self, names: Sequence[str]) -> list[Column]:
        """See :class:`Reader`."""
        known = self.columns
        columns = [column for name in names for column in known.find(name)]
        if all(column.is_settled for column in columns):
            return columns
        rows = list(self._examples([column.name for column in columns if not column.is_settled]))
        return [arrow_rows.settle(column, rows, self.ragged) for column in columns]

    def _examples(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows by which lists are taken for vectors: the first ones."""
        first = next((batch for batch in self.read(0, names) if batch.num_rows), None)
        if first is not None:
            yield first

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a unit, packed."""
        row = sum(self.units[:unit])
        for batch in self.read(unit, [column.name for column in layout.columns]):
            yield pack(layout, batch.num_rows, partial(self._column, batch, row))
            row += batch.num_rows

    def _column(self, batch: pa.RecordBatch, first: int, column: Column) -> Rows:
        return arrow_rows.read(batch, column, self.fill_null.get(column.name), first)


@dataclass(frozen=True)
class Table(ArrowReader):
    """An Arrow table that is pickled with the reader."""

    table: pa.Table

    def _examples(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from self.read(0, names)  # all of them: they are in memory

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        yield from self.table.to_batches(max_chunksize=1 << 13)


@dataclass(frozen=True)
class TableFile(ArrowReader):
    """An Arrow table in a file that all ranks can read."""

    path: Path

    def _examples(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from self.read(0, names)  # all of them, as of a table

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        with opened(str(self.path)) as file, pa.ipc.open_file(file) as stored:
            for number in range(stored.num_record_batches):
                yield stored.get_batch(number)


def opened(path: str) -> Any:
    """Open a file of Arrow's, mapped into memory where that is possible."""
    try:
        return pa.memory_map(path)
    except OSError:  # not every mounted store can do that
        return pa.OSFile(path)


@dataclass(frozen=True)
class Pieces:
    """Stores that were packed before, one after the other, in a folder that all ranks can read."""

    folder: Path
    names: list[str]  # of the stores in it
    units: list[int]  # rows of each store
    fingerprint: str
    columns: Columns  # by name; lists where the stores have lists of different lengths

    def settle(self, names: Sequence[str]) -> list[Column]:
        """See :class:`Reader`."""
        columns = [column for name in names for column in self.columns.find(name)]
        unknown = [column for column in columns if column.name not in self.columns]
        if all(column.is_settled for column in unknown):
            return columns
        # The value of a map's key, which no piece could describe.
        rows = [batch for number in range(len(self.names)) for batch in self._raw(number)]
        return [
            arrow_rows.settle(column, rows) if column in unknown else column for column in columns
        ]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a store, packed again if the layout has other columns."""
        store = PackedStore(self.folder / self.names[unit])
        store.open()
        packed = {column.name for column in store.layout.columns}
        raw = pa.Table.from_batches(self._raw(unit)) if self._has_raw(unit) else None
        row = 0
        for chunk in store.chunks():
            if store.layout.columns == layout.columns:
                yield chunk
                continue
            columns = store.layout.split(chunk)
            others = [column for column in layout.columns if column.name not in packed]
            if others:
                assert raw is not None  # noqa: S101 - what is not packed is there
                rows = raw.slice(row, chunk.rows).combine_chunks().to_batches()[0]
                first = sum(self.units[:unit]) + row
                for column in others:
                    columns[column.name] = arrow_rows.read(rows, column, first=first)
            row += chunk.rows
            yield pack(layout, chunk.rows, lambda column: _as(column, columns[column.name]))  # noqa: B023

    def _has_raw(self, unit: int) -> bool:
        return (self.folder / self.names[unit] / RAW).exists()

    def _raw(self, unit: int) -> list[pa.RecordBatch]:
        """The columns of a store that were kept as they came."""
        if not self._has_raw(unit):
            return []
        path = str(self.folder / self.names[unit] / RAW)
        with pa.ipc.open_file(opened(path)) as stored:
            return [stored.get_batch(number) for number in range(stored.num_record_batches)]


class Deferred(ABC):
    """A dataset whose rows are known only on the ranks."""

    @abstractmethod
    def resolve(
        self, rank: int, descriptions: Sequence[bytes], folder: Path
    ) -> tuple[Pieces, list[int] | None]:
        """Find the rows on a rank's host, where the run has a folder.

        Args:
            rank: the rank's number.
            descriptions: for rows that came through the barrier job, the description of each
                rank's piece, in the order of ranks.
            folder: the run's.

        Returns:
            The rows. If each rank has rows of its own, also the number of rows of each rank;
            otherwise None.
        """


def _as(column: Column, rows: Rows) -> Rows:
    """Reshape a list that is a vector, now that all pieces are known."""
    if column.is_fixed and rows.lengths is not None:
        return Rows(rows.values.reshape(len(rows.lengths), *column.shape))
    return rows
