"""Pieces: rows packed before their number is known, and joined to one dataset later."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow as pa

from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack.columns import Column
from horovod_runner.data.pack.file_locks import make_together, write_whole
from horovod_runner.data.pack.layout import Chunk, Layout, fingerprint_of
from horovod_runner.data.pack.writer import Writer
from horovod_runner.data.read.readers import Pieces, pack_batch
from horovod_runner.errors import DataError

_SAMPLE_BYTES = 1 << 10


class Piece(msgspec.Struct):
    """Description of a piece, sent to the driver and the ranks.

    Attributes:
        number: its position among the pieces.
        name: name of its store.
        rows: how many rows it has.
        columns: its columns; empty if it has no rows.
        lengths: the shortest and the longest row of each list.
        sample: a checksum of some of its rows.
    """

    number: int
    name: str
    rows: int = 0
    columns: list[Column] = []
    lengths: dict[str, tuple[int, int]] = {}
    sample: int = 0


decode_piece: Final = msgspec.msgpack.Decoder(Piece).decode


class PieceWriter:
    """Writes record batches to a store with one unit; a context manager.

    Args:
        folder: parent folder of the store, which is made with the first rows.
        number: the piece's position among the pieces.
        name: name of the store.
    """

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self._folder = folder / name
        self._piece = Piece(number, name)
        self._layout = Layout([], [])
        self._writer: Writer | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Write rows behind those written before.

        Raises:
            DataError: a column has nulls, or the run's limit or the disk leaves too little room.
            OSError: the disk is full.
        """
        if not batch.num_rows:
            return
        if self._writer is None:
            self._begin(batch)
        assert self._writer is not None  # noqa: S101 - it has begun
        chunk = pack_batch(batch, self._layout, {})
        self._writer.append(chunk)
        self._describe(chunk)

    def _begin(self, batch: pa.RecordBatch) -> None:
        # Lists stay lists: which of them are vectors is known once all pieces are written.
        columns = column_types.columns_of(batch.schema).values()
        settled = [column_types.settle(column, batch, lists=False) for column in columns]
        self._layout = Layout(settled, [])
        self._folder.mkdir(mode=0o700)
        self._writer = Writer(self._folder, self._layout)
        self._writer.__enter__()

    def _describe(self, chunk: Chunk) -> None:
        piece = self._piece
        for name, rows in chunk.ragged.items():
            assert rows.lengths is not None  # noqa: S101 - it is ragged
            low, high = int(rows.lengths.min()), int(rows.lengths.max())
            before = piece.lengths.get(name, (low, high))
            piece.lengths[name] = min(low, before[0]), max(high, before[1])
        for array in [*chunk.matrices, *(rows.values for rows in chunk.ragged.values())]:
            piece.sample = zlib.crc32(array[:1].tobytes()[:_SAMPLE_BYTES], piece.sample)

    def finish(self) -> Piece:
        """Complete the store, and return the piece's description."""
        if self._writer is not None:
            self._writer.__exit__(None)
            self._piece.rows = self._writer.rows
            self._piece.columns = self._layout.columns
            Layout(self._layout.columns, [self._writer.rows]).save(self._folder)
            self._writer = None
        return self._piece

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the store if it is not complete."""
        if self._writer is not None:
            self._writer.__exit__(OSError)
            self._writer = None
            shutil.rmtree(self._folder, ignore_errors=True)


def write_together(
    folder: Path, name: str, count: int, read: Callable[[int], Iterator[pa.RecordBatch]]
) -> list[Piece]:
    """Write pieces, together with the other processes of this host that need them.

    Args:
        folder: the run's folder.
        name: the dataset's name.
        count: the number of pieces.
        read: yields the rows of a piece, by its number.

    Raises:
        DataError: a column cannot become a tensor, has nulls, or there is too little room.
    """
    paths = [folder / f"{name}-{number}.piece" for number in range(count)]

    def make(number: int) -> None:
        # Another name each time: files of a process that was killed while it wrote may be there.
        with PieceWriter(folder, number, f"{name}-{number}-{uuid4().hex[:8]}") as writer:
            for batch in read(number):
                writer.append(batch)
            description = msgspec.msgpack.encode(writer.finish())
        write_whole(paths[number], description)

    make_together(paths, make)
    return [decode_piece(path.read_bytes()) for path in paths]


def join(pieces: Sequence[Piece], schema: pa.Schema, folder: Path) -> Pieces:
    """Join pieces to one dataset, one after the other.

    Raises:
        DataError: Spark ML vectors differ in size.
    """
    filled = [piece for piece in pieces if piece.rows]
    columns = {}
    for name, by_type in column_types.columns_of(schema).items():
        in_pieces = {column for piece in filled for column in piece.columns if column.name == name}
        lengths = {length for piece in filled for length in piece.lengths.get(name, ())}
        columns[name] = _common(by_type, in_pieces, lengths)
    content = repr([(piece.rows, piece.columns, piece.sample) for piece in filled])
    return Pieces(
        folder,
        [piece.name for piece in filled],
        [piece.rows for piece in filled],
        fingerprint_of(content),
        columns,
    )


def _common(by_type: Column, in_pieces: set[Column], lengths: set[int]) -> Column:
    """The column that fits all pieces.

    Args:
        by_type: the column that the schema gives.
        in_pieces: the columns that the pieces have.
        lengths: the shortest and the longest rows of all pieces.
    """
    if by_type.kind == "list" and len(lengths) == 1:
        return Column(by_type.name, "vector", by_type.dtype, tuple(lengths))
    if len(in_pieces) == 1:
        return in_pieces.pop()
    if by_type.kind == "vector" and in_pieces:
        sizes = " and ".join(str(column.width) for column in in_pieces)
        raise DataError(
            f"column {by_type.name!r} has vectors of {sizes} numbers: vectors must have one size"
        )
    return by_type
