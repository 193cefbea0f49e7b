"""Pieces: rows packed before their number is known, and joined to one dataset later."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import numpy as np
import pyarrow as pa

from horovod_runner.data.pack import arrow_rows
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack.columns import Column, Rows, Sizes
from horovod_runner.data.pack.file_locks import make_together, write_whole
from horovod_runner.data.pack.layout import Chunk, Layout, fingerprint_of, pack
from horovod_runner.data.pack.nested import ANY_KEY, column_at, is_ml_vector, leaves
from horovod_runner.data.pack.writer import Writer
from horovod_runner.data.read.readers import RAW, Pieces
from horovod_runner.errors import DataError
from horovod_runner.host.scratch import check_room


class Piece(msgspec.Struct):
    """Description of a piece, sent to the driver and the ranks."""

    number: int  # its position among the pieces
    name: str  # of its store
    rows: int = 0
    columns: list[Column] = []  # that are packed; empty if it has no rows
    lengths: dict[str, Sizes] = {}  # the shortest and the longest row of each list, by level
    refused: dict[str, str] = {}  # why columns cannot be used: the first null, for example
    checksum: int = 0  # of all its rows


decode_piece: Final = msgspec.msgpack.Decoder(Piece).decode


class PieceWriter:
    """Writes record batches to a store with one unit; a context manager.

    Nobody knows yet which columns will be asked for. So a null is noted, not refused, and columns
    that only some readings fit (maps, lists of lists or of structs, sparse vectors) are kept as
    they are, in a file of Arrow's. The store called ``name`` is made with the first rows.
    """

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self._folder = folder / name
        self._piece = Piece(number, name)
        self._layout = Layout([], [])
        self._writer: Writer | None = None
        self._raw: list[str] = []  # columns that are kept as they are
        self._raw_file: Any = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Write rows behind those written before.

        Raises:
            DataError: the run's limit or the disk leaves too little room.
            OSError: the disk is full.
        """
        if not batch.num_rows:
            return
        if self._writer is None:
            self._begin(batch)
        assert self._writer is not None  # noqa: S101 - it has begun
        chunk = pack(self._layout, batch.num_rows, lambda column: self._read(batch, column))
        raw = batch.select(self._raw)
        self._writer.append(chunk)
        if self._raw:
            check_room(self._folder.parent, raw.nbytes)
            self._raw_file.write_batch(raw)
        self._describe(chunk, raw)

    def _read(self, batch: pa.RecordBatch, column: Column) -> Rows:
        """The rows of a column, or zeros if they cannot be used."""
        if column.name not in self._piece.refused:
            try:
                return arrow_rows.read(batch, column)
            except DataError as error:
                self._piece.refused[column.name] = str(error)
        if column.is_fixed:
            return Rows(np.zeros((batch.num_rows, *column.shape), column.dtype))
        return Rows(np.empty(0, column.stored_dtype), np.zeros(batch.num_rows, np.int64))

    def _begin(self, batch: pa.RecordBatch) -> None:
        # Lists stay lists: which of them are vectors is known once all pieces are written.
        self._raw = [
            name
            for name, array in zip(batch.schema.names, batch.columns, strict=True)
            if not _is_plain(name, array)
        ]
        plain = [field for field in batch.schema if field.name not in self._raw]
        columns = column_types.columns_of(pa.schema(plain)).values()
        self._layout = Layout(
            [
                column if column.kind == "list" else arrow_rows.settle(column, [batch])
                for column in columns
            ],
            [],
        )
        self._folder.mkdir(mode=0o700)
        self._writer = Writer(self._folder, self._layout)
        self._writer.__enter__()
        if self._raw:
            schema = batch.select(self._raw).schema
            self._raw_file = pa.ipc.new_file(str(self._folder / RAW), schema)

    def _describe(self, chunk: Chunk, raw: pa.RecordBatch) -> None:
        piece = self._piece
        sizes: dict[str, Sizes] = {}
        written: list[Any] = [raw.serialize()] if self._raw else []
        written += chunk.matrices
        for name, rows in chunk.ragged.items():
            assert rows.lengths is not None  # noqa: S101 - it is ragged
            written += [rows.lengths, rows.values]
            sizes[name] = [(int(rows.lengths.min()), int(rows.lengths.max()))]
        for name, column in column_types.columns_of(raw.schema).items():
            if not column.is_settled:
                sizes[name] = arrow_rows.sizes_of(column_at(raw, name))
        for name, of_batch in sizes.items():
            before = piece.lengths.get(name, of_batch)
            piece.lengths[name] = arrow_rows.joined([before, of_batch])
        for each in written:  # some gigabytes a second: faster than the disk
            piece.checksum = zlib.crc32(np.ascontiguousarray(each), piece.checksum)

    def finish(self) -> Piece:
        """Complete the store, and return the piece's description."""
        if self._writer is not None:
            self._piece.rows = self._writer.rows
            self._piece.columns = self._layout.columns
            self._close(None)
            Layout(self._piece.columns, [self._piece.rows]).save(self._folder)
        return self._piece

    def _close(self, error: type[BaseException] | None) -> None:
        assert self._writer is not None  # noqa: S101 - it has begun
        self._writer.__exit__(error)
        if self._raw:
            self._raw_file.close()
        self._writer = None

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:  # it is not complete
            self._close(OSError)
            shutil.rmtree(self._folder, ignore_errors=True)


def write_together(
    folder: Path, name: str, count: int, read: Callable[[int], Iterator[pa.RecordBatch]]
) -> list[Piece]:
    """Write the pieces of a dataset, together with the other processes of this host that need them.

    ``read`` yields the rows of a piece, by its number.

    Raises:
        DataError: there is too little room.
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


def _is_plain(name: str, array: pa.Array) -> bool:
    """Whether all of a column is packed as it will be read, whoever asks for it."""
    types = leaves(pa.schema([(name, array.type)]))
    if any(is_ml_vector(type_) for type_ in types.values()):
        # A sparse vector may be a thousand times as large when it is dense.
        return array.type in types.values() and not arrow_rows.has_sparse(array)
    columns = column_types.columns_of(pa.schema([(name, array.type)]))
    return len(columns) == len(types) and all(
        column.kind != "object" and f".{ANY_KEY}" not in column.name for column in columns.values()
    )


def join(pieces: Sequence[Piece], schema: pa.Schema, folder: Path) -> Pieces:
    """Join pieces, whose stores are in a folder, to one dataset, one after the other."""
    filled = [piece for piece in pieces if piece.rows]
    odd: dict[str, str] = {}
    for piece in filled:
        odd = {**piece.refused, **odd}
    columns = column_types.columns_of(column_types.refusing(schema, odd))
    found = []
    for name, by_type in columns.items():
        in_pieces = {column for piece in filled for column in piece.columns if column.name == name}
        lengths = [piece.lengths[name] for piece in filled if name in piece.lengths]
        try:
            found.append(_common(by_type, in_pieces, lengths))
        except DataError as error:
            odd[name] = str(error)
    content = repr([(piece.rows, piece.columns, piece.checksum) for piece in filled])
    return Pieces(
        folder,
        [piece.name for piece in filled],
        [piece.rows for piece in filled],
        fingerprint_of(content),
        columns.changed(found, odd),
    )


def _common(by_type: Column, in_pieces: set[Column], lengths: Sequence[Sizes]) -> Column:
    """The column that fits all pieces, by the columns that they have packed, and their lengths."""
    if by_type.is_settled:
        return by_type
    sizes = arrow_rows.joined(lengths) if lengths else []
    if by_type.kind != "vector":
        return arrow_rows.settled(by_type, sizes)
    widths = {column.width for column in in_pieces} | {width for pair in sizes for width in pair}
    if len(widths) > 1:
        raise DataError(
            f"column {by_type.name!r} has vectors of {' and '.join(map(str, sorted(widths)))} "
            "numbers: vectors must have one size"
        )
    return Column(by_type.name, "vector", by_type.dtype, tuple(widths)) if widths else by_type
