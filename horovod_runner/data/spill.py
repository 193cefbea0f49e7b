"""A DataFrame comes to the ranks through the barrier job itself, where they share no storage.

    DataFrames --union, repartition--> barrier tasks --> a piece on each rank's own disk

Each rank then has its own rows, and the batches depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from horovod_runner.data.pieces import Piece, PieceWriter, joined
from horovod_runner.data.readers import Deferred, Pieces, named
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def combine(frames: Mapping[str, DataFrame], size: int) -> DataFrame:
    """One DataFrame with the rows of all, spread evenly over so many partitions.

    A column for each, a struct; a row has one of them, the others are null.
    """
    from pyspark.sql import functions

    whole: DataFrame | None = None
    for name, frame in frames.items():
        columns = [
            functions.struct(*(frame[_quoted(column)] for column in frame.columns)).alias(other)
            if other == name
            else functions.lit(None).cast(_struct_type(frames[other])).alias(other)
            for other in frames
        ]
        part = frame.select(*columns)
        whole = part if whole is None else whole.union(part)
    assert whole is not None  # noqa: S101 - there is a frame
    # A row of nulls: Spark starts no task at all for what it knows to be empty.
    none = [functions.lit(None).cast(_struct_type(frames[name])).alias(name) for name in frames]
    return whole.union(whole.sparkSession.range(1).select(*none)).repartition(size)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _struct_type(frame: DataFrame) -> object:
    from pyspark.sql.types import StructType

    return StructType(frame.schema.fields)


def take_in(
    names: Sequence[str], folder: Path, number: int, batches: Iterator[pa.RecordBatch]
) -> dict[str, bytes]:
    """The task's part: write its rows of each dataset to this host's disk.

    Returns:
        What there is to tell of each piece, by the dataset's name.

    Raises:
        DataError: a column has nulls, or the disk is too small.
    """
    examples: dict[str, bytes] = {}
    writers = {name: PieceWriter(folder, number, f"{name}-{number}") for name in names}
    try:
        for batch in batches:
            for name, writer in writers.items():
                column = batch.column(batch.schema.get_field_index(name))
                rows = column.filter(pc.is_valid(column)) if column.null_count else column
                if len(rows):
                    with named(name):
                        writer.append(pa.RecordBatch.from_struct_array(rows))
                    if name not in examples:
                        examples[name] = _stored(pa.RecordBatch.from_struct_array(rows[:1]))
        return {
            name: msgspec.msgpack.encode(_Told(writer.finish(), examples.get(name, b"")))
            for name, writer in writers.items()
        }
    except OSError as error:
        raise DataError(
            f"the rows of rank {number} could not be written to {folder}: {error}. Free space "
            "there, or set TMPDIR to a folder on another disk"
        ) from error
    finally:
        for writer in writers.values():
            writer.close()


class _Told(msgspec.Struct):
    """What there is to tell of one rank's rows.

    Attributes:
        piece: where they are.
        example: the first of them, for ranks that have none.
    """

    piece: Piece
    example: bytes


def _stored(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stored: bytes = sink.getvalue().to_pybytes()
    return stored


@dataclass(frozen=True)
class Spilled(Deferred):
    """What the driver knows of a DataFrame that is spread over the ranks.

    Attributes:
        name: the dataset's.
        schema: the DataFrame's, as Arrow sees it.
    """

    name: str
    schema: pa.Schema

    def on(self, rank: int, told: Sequence[bytes], folder: Path) -> tuple[Pieces, list[int]]:
        """This rank's part, and the number of rows of each rank."""
        all_told = [msgspec.msgpack.decode(one, type=_Told) for one in told]
        pieces = [one.piece for one in all_told]
        whole = joined(pieces, self.schema, folder)
        counts = [piece.rows for piece in pieces]
        own = pieces[rank]
        if not own.rows and any(counts):
            # It takes part with a row of another rank's, all of it padding.
            example = next(one.example for one in all_told if one.example)
            with PieceWriter(folder, rank, f"{self.name}-{rank}-example") as writer:
                for batch in pa.ipc.open_stream(example):
                    writer.append(batch)
                own = writer.finish()
        units = [own.rows] if own.rows else []
        names = [own.name] * len(units)
        return Pieces(folder, names, units, whole.fingerprint, whole.all_columns), counts
