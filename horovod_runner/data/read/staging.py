"""Staging: writes a DataFrame's rows, packed, to a folder that driver and executors share.

    DataFrame --mapInArrow--> one piece per partition --> Pieces

No barrier and no shuffle: packing is the last step of the DataFrame's own Spark job.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import pyarrow as pa

from horovod_runner.common.spark_session import collect_in_arrow
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.read.pieces import PieceWriter, decode_piece, join
from horovod_runner.data.read.readers import Pieces, twins
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEMA = "piece binary, error string"


def stage(dataframe: DataFrame, folder: Path) -> Pieces:
    """Write a DataFrame's rows to a folder that all executors and this process share."""
    rows = Readable.of(dataframe)
    pieces = []
    write = partial(write_piece, folder, rows.schema.names)
    for row in collect_in_arrow(rows.dataframe, write, _SCHEMA):
        if row["error"]:
            raise DataError(row["error"])
        pieces.append(decode_piece(bytes(row["piece"])))
    in_order = sorted(pieces, key=lambda piece: piece.number)
    return join(in_order, rows.schema, folder)


@dataclass(frozen=True)
class Readable:
    """What ranks can read of a DataFrame, with the Arrow schema of :func:`arrow_schema`.

    In ``dataframe`` its columns are called "0", "1" and so on: mapInArrow looks columns up by name,
    and takes a dot in a name for a field of a struct.
    """

    dataframe: DataFrame
    schema: pa.Schema

    @classmethod
    def of(cls, dataframe: DataFrame) -> Readable:
        """Leave out what Spark cannot send to Python."""
        if dataframe.isStreaming:
            raise DataError(
                "it is a streaming DataFrame, which has no end: write it to a table, and pass that"
            )
        names = dataframe.columns
        schema = arrow_schema(dataframe)
        refused = column_types.refused_in(schema)
        if not len(schema):
            raise DataError("; ".join(refused.values()) or "it has no columns")
        rows = dataframe.toDF(*map(str, range(len(names))))
        if refused:
            rows = rows.select([str(at) for at, name in enumerate(names) if name not in refused])
            rows = rows.toDF(*map(str, range(len(schema))))
        return cls(rows, schema)


def arrow_schema(dataframe: DataFrame) -> pa.Schema:
    """Convert a DataFrame's schema to Arrow.

    Returns:
        The schema, without the columns for which Arrow has no type or whose name another column
        has. It notes why, see `columns.refusing`.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    spark_schema = dataframe.schema  # read once: over Spark Connect it is a request
    refused = twins(spark_schema.names)
    # Spark 4.1 requires a time zone. Timestamps become int64 whatever it is.
    parameters = inspect.signature(to_arrow_schema).parameters
    options = {"timezone": "UTC"} if "timezone" in parameters else {}
    fields = []
    for field in spark_schema:
        if field.name in refused:
            continue
        try:
            fields += to_arrow_schema(StructType([field]), **options)
        except Exception as error:  # pyspark's classes differ from release to release
            refused[field.name] = (
                f"column {field.name!r} of type {field.dataType.simpleString()} cannot become a "
                f"tensor, as Spark cannot convert it to Arrow ({error}): leave it out, or turn "
                "it into numbers, lists of numbers, text or bytes first"
            )
    return column_types.refusing(pa.schema(fields), refused)


def head(dataframe: DataFrame, count: int) -> pa.RecordBatch | None:
    """The first rows of a DataFrame, by a small Spark job; None if there are none."""
    rows = dataframe.limit(count)
    if hasattr(rows, "toArrow"):  # Spark 4
        table = rows.toArrow()
    else:
        cells = collect_in_arrow(rows, _as_streams, "rows binary")
        tables = [pa.ipc.open_stream(bytes(cell["rows"])).read_all() for cell in cells]
        if not tables:
            return None
        table = pa.concat_tables(tables)
    return table.combine_chunks().to_batches()[0] if len(table) else None


def _as_streams(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each record batch as one cell, in Arrow's stream format."""
    for batch in batches:
        if batch.num_rows:
            cell = pa.array([as_stream(batch)], pa.binary())
            yield pa.RecordBatch.from_arrays([cell], ["rows"])


def as_stream(batch: pa.RecordBatch) -> bytes:
    """A record batch in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def write_piece(
    folder: Path, names: list[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a partition, in a Spark task, and yield one row with the piece's description."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None  # noqa: S101 - Spark runs this
    number = context.partitionId()
    # A unique name: Spark may run a task twice, and each needs its own files.
    name = f"piece-{number}-{uuid4().hex[:8]}"
    description, message = b"", ""
    try:
        with PieceWriter(folder, number, name) as writer:
            for batch in batches:
                writer.append(pa.RecordBatch.from_arrays(batch.columns, names=names))
            description = msgspec.msgpack.encode(writer.finish())
    except DataError as error:
        message = str(error)
    except OSError as error:
        message = (
            f"an executor could not write rows to {folder}: {error}. The folder must be shared by "
            "the driver and all executors, with room for the whole dataset: set "
            "data_config=DataConfig(shared_dir=...)"
        )
    row = [pa.array([description]), pa.array([message])]
    yield pa.RecordBatch.from_arrays(row, ["piece", "error"])
