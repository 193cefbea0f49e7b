"""Readers: datasets as they are sent to the ranks; those of tables and of packed pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from horovod_runner.common.text import has_password
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack.columns import Column, Rows
from horovod_runner.data.pack.layout import Chunk, Layout, pack
from horovod_runner.data.pack.store import Store
from horovod_runner.errors import DataError


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


class Reader(Protocol):
    """A dataset that ranks can read; pickled on the driver."""

    @property
    def units(self) -> list[int]:
        """Rows of each unit, a part that can be read by itself."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data."""

    @property
    def columns(self) -> dict[str, Column]:
        """The columns, by name."""

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed: a list may turn out to be a vector."""

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a unit, packed."""


@dataclass(frozen=True, kw_only=True)
class ArrowReader(ABC):
    """A reader that yields Arrow record batches.

    Attributes:
        schema: the Arrow schema.
        units: rows of each unit, a part that can be read by itself.
        fingerprint: identifies the data.
        fill_null: values that replace nulls, by column.
        ragged: lists that are not vectors, even if their first rows have one length.
    """

    schema: pa.Schema
    units: list[int]
    fingerprint: str
    fill_null: Mapping[str, Any] = field(default_factory=dict)
    ragged: Sequence[str] = ()

    @abstractmethod
    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit, some thousand at a time."""

    @property
    def columns(self) -> dict[str, Column]:
        """The columns, by name.

        Raises:
            DataError: a column cannot become a tensor.
        """
        return column_types.columns_of(self.schema)

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed: a list may turn out to be a vector."""
        known = self.columns
        columns = [known[name] for name in names]
        if all(column.is_settled for column in columns):
            return columns
        first = next((batch for batch in self.read(0, names) if batch.num_rows), None)
        if first is None:
            return columns
        return [column_types.settle(column, first, self.ragged) for column in columns]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a unit, packed."""
        for batch in self.read(unit, [column.name for column in layout.columns]):
            yield pack_batch(batch, layout, self.fill_null)


def pack_batch(batch: pa.RecordBatch, layout: Layout, fill_null: Mapping[str, Any]) -> Chunk:
    """Pack the rows of a record batch."""

    def read(column: Column) -> Rows:
        return column_types.read(batch, column, fill_null.get(column.name))

    return pack(layout, batch.num_rows, read)


@dataclass(frozen=True)
class Table(ArrowReader):
    """An Arrow table that is pickled with the reader."""

    table: pa.Table

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        yield from self.table.to_batches(max_chunksize=1 << 13)


@dataclass(frozen=True)
class TableFile(ArrowReader):
    """An Arrow table in a file that all ranks can read."""

    path: Path

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        with self._open() as file, pa.ipc.open_file(file) as stored:
            for number in range(stored.num_record_batches):
                yield stored.get_batch(number)

    def _open(self) -> Any:
        try:
            return pa.memory_map(str(self.path))
        except OSError:  # not every mounted store can do that
            return pa.OSFile(str(self.path))


@dataclass(frozen=True)
class Pieces:
    """Stores that were packed before, one after the other, in a folder that all ranks can read.

    Attributes:
        folder: the folder.
        names: names of the stores in it.
        units: rows of each store.
        fingerprint: identifies the data.
        columns: by name; a list where the stores have lists of different lengths.
    """

    folder: Path
    names: list[str]
    units: list[int]
    fingerprint: str
    columns: dict[str, Column]

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed."""
        return [self.columns[name] for name in names]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a store, packed again if the layout has other columns."""
        store = Store(self.folder / self.names[unit])
        store.open()
        for chunk in store.chunks():
            if store.layout.columns == layout.columns:
                yield chunk
                continue
            columns = store.layout.split(chunk)
            yield pack(layout, chunk.rows, lambda column: _as(column, columns[column.name]))  # noqa: B023


class Deferred(ABC):
    """A dataset whose rows are known only on the ranks."""

    @abstractmethod
    def resolve(
        self, rank: int, descriptions: Sequence[bytes], folder: Path
    ) -> tuple[Pieces, list[int] | None]:
        """Find the rows on a rank's host.

        Args:
            rank: the rank's number.
            descriptions: for rows that came through the barrier job, the description of each
                rank's piece, in the order of ranks.
            folder: the run's folder on this host.

        Returns:
            The rows. If each rank has rows of its own, also the number of rows of each rank;
            otherwise None.
        """


def _as(column: Column, rows: Rows) -> Rows:
    """Reshape a list that is a vector, now that all pieces are known."""
    if column.is_fixed and rows.lengths is not None:
        return Rows(rows.values.reshape(len(rows.lengths), *column.shape))
    return rows
