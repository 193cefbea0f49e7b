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
from horovod_runner.data.readers import Deferred, Pieces
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
    return whole.repartition(size)


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
    writers = {name: PieceWriter(folder, number, f"{name}-{number}") for name in names}
    try:
        for batch in batches:
            for name, writer in writers.items():
                column = batch.column(batch.schema.get_field_index(name))
                rows = column.filter(pc.is_valid(column)) if column.null_count else column
                if len(rows):
                    writer.append(pa.RecordBatch.from_arrays(rows.flatten(), _fields(rows)))
        return {name: msgspec.msgpack.encode(writer.finish()) for name, writer in writers.items()}
    except OSError as error:
        raise DataError(
            f"the rows of rank {number} could not be written to {folder}: {error}. Free space "
            "there, or set TMPDIR to a folder on another disk"
        ) from error
    finally:
        for writer in writers.values():
            writer.close()


def _fields(array: pa.StructArray) -> list[str]:
    return [field.name for field in array.type]


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
        pieces = [msgspec.msgpack.decode(one, type=Piece) for one in told]
        whole = joined(pieces, self.schema, folder)
        own = pieces[rank]
        counts = [piece.rows for piece in pieces]
        return Pieces(
            folder,
            [own.name] if own.rows else [],
            [own.rows] if own.rows else [],
            whole.fingerprint,
            whole.all_columns,
        ), counts
