"""Sources as they travel to the ranks: what gives Arrow batches, and what was packed before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from horovod_runner.data import columns as cols
from horovod_runner.data.columns import Column, Rows
from horovod_runner.data.store import Chunk, Layout, Store, pack
from horovod_runner.errors import DataError


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put a dataset's name before what is wrong with it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error.__cause__


class Reader(Protocol):
    """A source as it travels to the ranks."""

    @property
    def units(self) -> list[int]:
        """The number of rows of each part that is read by itself."""

    @property
    def fingerprint(self) -> str:
        """Names the data."""

    @property
    def columns(self) -> dict[str, Column]:
        """What there is, by name."""

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed: a list may turn out to be a vector."""

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """The rows of a part, packed."""


@dataclass(frozen=True, kw_only=True)
class ArrowReader(ABC):
    """Something that gives Arrow record batches.

    Attributes:
        schema: of what it gives.
        units: the number of rows of each part that is read by itself.
        fingerprint: names the data.
        fill: for nulls, by column.
        ragged: lists that are no vectors, though their first rows may be as long as each other.
    """

    schema: pa.Schema
    units: list[int]
    fingerprint: str
    fill: Mapping[str, Any] = field(default_factory=dict)
    ragged: Sequence[str] = ()

    @abstractmethod
    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a part, some thousand at a time."""

    @property
    def columns(self) -> dict[str, Column]:
        """What there is, by name.

        Raises:
            DataError: a column cannot become a tensor.
        """
        return cols.choose(self.schema)

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed: a list may turn out to be a vector."""
        there = self.columns
        found = [there[name] for name in names]
        if all(column.is_settled for column in found):
            return found
        first = next((b for b in self.read(0, names) if b.num_rows), None)
        if first is None:
            return found
        return [cols.settle(column, first, self.ragged) for column in found]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """The rows of a part, packed."""
        for batch in self.read(unit, [column.name for column in layout.columns]):
            yield pack_batch(batch, layout, self.fill)


def pack_batch(batch: pa.RecordBatch, layout: Layout, fill: Mapping[str, Any]) -> Chunk:
    """Some rows, packed."""
    return pack(
        layout, batch.num_rows, lambda column: cols.read(batch, column, fill.get(column.name))
    )


@dataclass(frozen=True)
class Table(ArrowReader):
    """An Arrow table, which goes to the ranks as it is."""

    table: pa.Table

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows."""
        yield from self.table.to_batches(max_chunksize=1 << 13)


@dataclass(frozen=True)
class TableFile(ArrowReader):
    """An Arrow table in a file that all ranks see."""

    path: Path

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows."""
        with pa.memory_map(str(self.path)) as file, pa.ipc.open_file(file) as stored:
            for number in range(stored.num_record_batches):
                yield stored.get_batch(number)


@dataclass(frozen=True)
class Pieces:
    """Datasets that were packed before, one behind the other, in a folder that all ranks see.

    Attributes:
        folder: where they are.
        names: of the stores in it.
        units: how many rows each has.
        fingerprint: names the data.
        all_columns: what they hold; a list where they do not agree on its length.
    """

    folder: Path
    names: list[str]
    units: list[int]
    fingerprint: str
    all_columns: list[Column]

    @property
    def columns(self) -> dict[str, Column]:
        """What there is, by name."""
        return {column.name: column for column in self.all_columns}

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed; it is known."""
        return [self.columns[name] for name in names]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """The rows of a piece, packed as they are asked for."""
        store = Store(self.folder / self.names[unit])
        store.open()
        for chunk in store.chunks():
            if store.layout.columns == layout.columns:
                yield chunk
                continue
            apart = store.layout.apart(chunk)
            yield pack(layout, chunk.rows, lambda column: _as(column, apart[column.name]))  # noqa: B023


class Deferred(ABC):
    """A source whose rows are known on the ranks alone."""

    @abstractmethod
    def on(self, rank: int, told: Sequence[bytes], folder: Path) -> tuple[Pieces, list[int] | None]:
        """The rows on a rank's host.

        Args:
            rank: the rank's number.
            told: of what came through the barrier job, what there is to tell of each rank's piece,
                in the order of ranks.
            folder: the run's folder on this host.

        Returns:
            The rows, and how many each rank has where each has rows of its own.
        """


def _as(column: Column, rows: Rows) -> Rows:
    """What a piece has as a list may be a vector, now that all pieces are known."""
    if column.is_fixed and rows.lengths is not None:
        return Rows(rows.values.reshape(len(rows.lengths), *column.shape))
    return rows
