"""Spill: sends DataFrames to the ranks through the barrier job, without shared storage.

    DataFrames --union, repartition--> barrier tasks --> a piece on each rank's local disk

Each rank then has rows of its own, and the batches depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from horovod_runner.data.read.pieces import Piece, PieceWriter, join
from horovod_runner.data.read.readers import Deferred, Pieces, name_in_errors
from horovod_runner.data.read.staging import Readable, as_stream
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def combine(dataframes: Mapping[str, DataFrame], size: int) -> DataFrame:
    """Combine DataFrames to one with ``size`` partitions, the rows spread evenly.

    It has one struct column for each DataFrame. In each row one of them is set, the others are
    null.
    """
    from pyspark.sql import functions

    rows = {name: Readable.of(dataframe) for name, dataframe in dataframes.items()}
    nulls = {
        name: functions.lit(None).cast(_struct_type(readable)).alias(name)
        for name, readable in rows.items()
    }
    # One row of nulls: Spark starts no tasks for a DataFrame that it knows to be empty.
    session = next(iter(dataframes.values())).sparkSession
    whole = session.range(1).select(*nulls.values())
    for name, readable in rows.items():
        columns = [
            functions.col(str(at)).alias(column) for at, column in enumerate(readable.schema.names)
        ]
        own = {name: functions.struct(*columns).alias(name)}
        whole = whole.union(readable.dataframe.select(*{**nulls, **own}.values()))
    return whole.repartition(size)


def _struct_type(rows: Readable) -> object:
    from pyspark.sql.types import StructField, StructType

    named = zip(rows.schema.names, rows.dataframe.schema, strict=True)
    return StructType([StructField(name, field.dataType) for name, field in named])


def receive_rows(
    names: Sequence[str], folder: Path, number: int, batches: Iterator[pa.RecordBatch]
) -> dict[str, bytes]:
    """Write a task's rows of each dataset, as :func:`combine` combined them, to this host's disk.

    Returns:
        The description of each piece, by the dataset's name.
    """
    examples: dict[str, bytes] = {}
    writers = {name: PieceWriter(folder, number, f"{name}-{number}") for name in names}
    try:
        with ExitStack() as stack:
            for writer in writers.values():
                stack.enter_context(writer)
            for batch in batches:
                for name, writer in writers.items():
                    column = batch.column(batch.schema.get_field_index(name))
                    rows = column.filter(pc.is_valid(column)) if column.null_count else column
                    if len(rows):
                        with name_in_errors(name):
                            writer.append(pa.RecordBatch.from_struct_array(rows))
                        if name not in examples:
                            examples[name] = as_stream(pa.RecordBatch.from_struct_array(rows[:1]))
            return {
                name: msgspec.msgpack.encode(_Description(writer.finish(), examples.get(name, b"")))
                for name, writer in writers.items()
            }
    except OSError as error:
        raise DataError(
            f"the rows of rank {number} could not be written to {folder}: {error}. Free space "
            "there, or set TMPDIR to a folder on another disk"
        ) from error


class _Description(msgspec.Struct):
    """What the other ranks learn about one rank's rows."""

    piece: Piece  # on that rank's disk
    example: bytes  # its first row as an Arrow stream, for ranks without rows; empty without rows


_decode_description: Final = msgspec.msgpack.Decoder(_Description).decode


@dataclass(frozen=True)
class Spilled(Deferred):
    """A DataFrame whose rows go to the ranks' disks: its name, and the columns that are sent."""

    name: str
    schema: pa.Schema

    def resolve(
        self, rank: int, descriptions: Sequence[bytes], folder: Path
    ) -> tuple[Pieces, list[int]]:
        """This rank's rows, and the number of rows of each rank."""
        decoded = [_decode_description(encoded) for encoded in descriptions]
        pieces = [description.piece for description in decoded]
        whole = join(pieces, self.schema, folder)
        counts = [piece.rows for piece in pieces]
        piece = pieces[rank]
        if not piece.rows and any(counts):
            # A rank without rows takes part with a row of another rank, all of it padding.
            example = next(description.example for description in decoded if description.example)
            with PieceWriter(folder, rank, f"{self.name}-{rank}-example") as writer:
                for batch in pa.ipc.open_stream(example):
                    writer.append(batch)
                piece = writer.finish()
        units = [piece.rows] if piece.rows else []
        return replace(whole, names=[piece.name] * len(units), units=units), counts
