"""Packed rows whose number is not known before the last one: pieces, and how they are joined."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow as pa

from horovod_runner.data import columns as cols
from horovod_runner.data.columns import Column
from horovod_runner.data.readers import Pieces, pack_batch
from horovod_runner.data.store import Chunk, Layout, Writer, together, write_layout
from horovod_runner.errors import DataError

_SAMPLE_BYTES = 1 << 10


class Piece(msgspec.Struct):
    """What there is to tell of a piece.

    Attributes:
        number: its place among the others.
        name: of its store.
        rows: how many it has.
        columns: what it holds; empty where it has no rows.
        lengths: the shortest and the longest row of each list.
        sample: a checksum of a sample of the rows.
    """

    number: int
    name: str
    rows: int = 0
    columns: list[Column] = []
    lengths: dict[str, tuple[int, int]] = {}
    sample: int = 0


class PieceWriter:
    """Writes record batches into a store of one unit; use it as a context.

    Args:
        folder: where to make it; nothing is made before there are rows.
        number: its place among the others.
        name: of the store.
    """

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self._folder = folder / name
        self._piece = Piece(number, name)
        self._layout = Layout([], [])
        self._writer: Writer | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Write some rows.

        Raises:
            DataError: a column has nulls, or the run has no room left.
            OSError: the disk is full.
        """
        if not batch.num_rows:
            return
        if self._writer is None:
            self._begin(batch)
        assert self._writer is not None  # noqa: S101 - it has begun
        chunk = pack_batch(batch, self._layout, {})
        self._writer.append(chunk)
        self._take_down(chunk)

    def _begin(self, batch: pa.RecordBatch) -> None:
        # Lists stay lists here: which of them are vectors is known when all pieces are there.
        there = cols.choose(batch.schema).values()
        self._layout = Layout([cols.settle(column, batch, lists=False) for column in there], [])
        self._folder.mkdir(mode=0o700)
        self._writer = Writer(self._folder, self._layout)
        self._writer.__enter__()

    def _take_down(self, chunk: Chunk) -> None:
        piece = self._piece
        for name, rows in chunk.ragged.items():
            assert rows.lengths is not None  # noqa: S101 - it is ragged
            low, high = int(rows.lengths.min()), int(rows.lengths.max())
            before = piece.lengths.get(name, (low, high))
            piece.lengths[name] = min(low, before[0]), max(high, before[1])
        for array in [*chunk.matrices, *(rows.values for rows in chunk.ragged.values())]:
            piece.sample = zlib.crc32(array[:1].tobytes()[:_SAMPLE_BYTES], piece.sample)

    def finish(self) -> Piece:
        """Say that all rows are there; returns what there is to tell."""
        if self._writer is not None:
            self._writer.__exit__(None)
            self._piece.rows = self._writer.rows
            self._piece.columns = self._layout.columns
            write_layout(self._folder, Layout(self._layout.columns, [self._writer.rows]))
            self._writer = None
        return self._piece

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was not finished."""
        if self._writer is not None:
            self._writer.__exit__(OSError)
            self._writer = None
            shutil.rmtree(self._folder, ignore_errors=True)


def pieces_together(
    folder: Path, name: str, parts: int, read: Callable[[int], Iterator[pa.RecordBatch]]
) -> list[Piece]:
    """Write pieces, together with whoever else on this host needs them.

    Args:
        folder: the run's.
        name: the dataset's.
        parts: how many.
        read: gives the rows of a part.

    Raises:
        DataError: a column cannot become a tensor, has nulls, or there is too little room.
    """

    def make(part: int) -> None:
        with PieceWriter(folder, part, f"{name}-{part}-{uuid4().hex[:8]}") as writer:
            for batch in read(part):
                writer.append(batch)
            told = msgspec.msgpack.encode(writer.finish())
        draft = paths[part].with_suffix(".draft")
        draft.write_bytes(told)
        draft.rename(paths[part])

    paths = [folder / f"{name}-{part}.told" for part in range(parts)]
    together(paths, make)
    return [msgspec.msgpack.decode(path.read_bytes(), type=Piece) for path in paths]


def joined(pieces: Sequence[Piece], schema: pa.Schema, folder: Path) -> Pieces:
    """Pieces, one behind the other, as one dataset.

    Raises:
        DataError: Spark ML vectors differ in size.
    """
    there = [piece for piece in pieces if piece.rows]
    columns = []
    for name, unsettled in cols.choose(schema).items():
        kinds = {column for piece in there for column in piece.columns if column.name == name}
        lengths = {n for piece in there for n in piece.lengths.get(name, ())}
        columns.append(_common(unsettled, kinds, lengths))
    described = repr([(piece.rows, piece.columns, piece.sample) for piece in there]).encode()
    return Pieces(
        folder,
        [piece.name for piece in there],
        [piece.rows for piece in there],
        hashlib.blake2b(described, digest_size=8).hexdigest(),
        columns,
    )


def _common(unsettled: Column, kinds: set[Column], lengths: set[int]) -> Column:
    if unsettled.kind == "list" and len(lengths) == 1:
        return Column(unsettled.name, "vector", unsettled.dtype, tuple(lengths))
    if len(kinds) == 1:
        return kinds.pop()
    if unsettled.kind == "vector" and kinds:
        sizes = " and ".join(str(column.width) for column in kinds)
        raise DataError(f"column {unsettled.name!r} has vectors of {sizes} numbers")
    return unsettled
