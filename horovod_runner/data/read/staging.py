"""Staging: writes a DataFrame's rows, packed, to a folder that driver and executors share.

    DataFrame --mapInArrow--> one piece per partition --> Pieces

No barrier and no shuffle: packing is the last step of the DataFrame's own Spark job.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import pyarrow as pa

from horovod_runner.common.spark_session import collect_in_arrow
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.read.pieces import PieceWriter, decode_piece, join
from horovod_runner.data.read.readers import Pieces
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEMA = "piece binary, error string"


def stage(dataframe: DataFrame, folder: Path) -> Pieces:
    """Write a DataFrame's rows.

    Args:
        dataframe: the DataFrame.
        folder: a folder that all executors and this process share.

    Raises:
        DataError: a column cannot become a tensor, has nulls, or there is too little room.
    """
    schema = bounded_schema(dataframe)
    pieces = []
    # mapInArrow looks columns up by name, and a dot in a name means a field of a struct to it.
    names = dataframe.columns
    numbered = dataframe.toDF(*map(str, range(len(names))))
    write = partial(write_piece, folder, names)
    for row in collect_in_arrow(numbered, write, _SCHEMA):
        if row["error"]:
            raise DataError(row["error"])
        pieces.append(decode_piece(bytes(row["piece"])))
    return join(sorted(pieces, key=lambda piece: piece.number), schema, folder)


def bounded_schema(dataframe: DataFrame) -> pa.Schema:
    """Convert the schema of a DataFrame that ranks will read to Arrow.

    Raises:
        DataError: a column cannot become a tensor, two columns have one name, or the DataFrame is
            a stream.
    """
    if dataframe.isStreaming:
        raise DataError(
            "it is a streaming DataFrame, which has no end: write it to a table, and pass that"
        )
    schema = arrow_schema(dataframe)
    column_types.columns_of(schema)
    return schema


def arrow_schema(dataframe: DataFrame) -> pa.Schema:
    """Convert a DataFrame's schema to Arrow.

    Raises:
        DataError: Arrow has no such type, or two columns have one name.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    spark_schema = dataframe.schema  # read once: over Spark Connect it is a request
    counts = Counter(field.name for field in spark_schema)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise DataError(f"two columns are called {', '.join(map(repr, twice))}: rename one")
    # Spark 4.1 requires a time zone. Timestamps become int64 whatever it is.
    parameters = inspect.signature(to_arrow_schema).parameters
    options = {"timezone": "UTC"} if "timezone" in parameters else {}
    fields = []
    for field in spark_schema:
        try:
            fields += to_arrow_schema(StructType([field]), **options)
        except Exception as error:  # pyspark's classes differ from release to release
            raise DataError(
                f"column {field.name!r} of type {field.dataType.simpleString()} cannot become a "
                f"tensor, as Spark cannot convert it to Arrow ({error}): leave it out, or turn "
                "it into numbers, lists of numbers, text or bytes first"
            ) from error
    return pa.schema(fields)


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
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            cell = pa.array([sink.getvalue().to_pybytes()], pa.binary())
            yield pa.RecordBatch.from_arrays([cell], ["rows"])


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
