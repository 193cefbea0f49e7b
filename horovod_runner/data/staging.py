"""A DataFrame becomes packed pieces in a folder that driver and executors share.

    DataFrame --mapInArrow--> one piece per partition --> Pieces

No barrier, no shuffle: it is the DataFrame's own job, with packing as its last step.
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

from horovod_runner.data import columns as cols
from horovod_runner.data.pieces import Piece, PieceWriter, joined
from horovod_runner.data.readers import Pieces
from horovod_runner.errors import DataError
from horovod_runner.session import map_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEMA = "piece binary, error string"


def stage(frame: DataFrame, folder: Path) -> Pieces:
    """Write a DataFrame's rows.

    Args:
        frame: the DataFrame.
        folder: on storage that all executors and this process share.

    Raises:
        DataError: a column cannot become a tensor, has nulls, or there is too little room.
    """
    schema = arrow_schema(frame)
    pieces = []
    # mapInArrow looks columns up by name, and takes dots in it for fields of structs.
    names = frame.columns
    numbered = frame.toDF(*map(str, range(len(names))))
    write = partial(write_piece, folder, names)
    for row in map_in_arrow(numbered, write, _SCHEMA).collect():
        if row["error"]:
            raise DataError(row["error"])
        pieces.append(msgspec.msgpack.decode(bytes(row["piece"]), type=Piece))
    return joined(sorted(pieces, key=lambda piece: piece.number), schema, folder)


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """A DataFrame's schema as Arrow sees it.

    Raises:
        DataError: a column cannot become a tensor.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    counts = Counter(frame.columns)  # asked for once: over Connect it may take a message
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise DataError(f"two columns are called {', '.join(map(repr, twice))}: rename one")
    if frame.isStreaming:
        raise DataError("it is a stream, which has no end: write it to a table, and pass that")
    # Spark 4.1 wants to be told, of what is an int64 to us in any case.
    named = inspect.signature(to_arrow_schema).parameters
    options = {"timezone": "UTC"} if "timezone" in named else {}
    fields = []
    for field in frame.schema:
        try:
            fields += to_arrow_schema(StructType([field]), **options)
        except Exception as error:  # pyspark's own kinds, which differ from release to release
            raise DataError(
                f"column {field.name!r} of type {field.dataType.simpleString()} cannot become a "
                f"tensor, as Spark does not turn it into Arrow ({error}): leave it out, or turn "
                "it into numbers, lists of numbers, text or bytes first"
            ) from error
    schema = pa.schema(fields)
    cols.choose(schema)
    return schema


def write_piece(
    folder: Path, names: list[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The Spark task: write a partition, and tell in one row where it is."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None  # noqa: S101 - Spark runs this
    number = context.partitionId()
    # A name of its own: a task that Spark runs twice must not meet the other's files.
    name = f"piece-{number}-{uuid4().hex[:8]}"
    told, error = b"", ""
    try:
        with PieceWriter(folder, number, name) as writer:
            for batch in batches:
                writer.append(pa.RecordBatch.from_arrays(batch.columns, names=names))
            told = msgspec.msgpack.encode(writer.finish())
    except DataError as found:
        error = str(found)
    except OSError as found:
        error = (
            f"a piece could not be written to {folder} by an executor: {found}. The folder has to "
            "be one that the driver and all executors share, with room for the whole dataset: set "
            "data_dir"
        )
    yield pa.RecordBatch.from_arrays([pa.array([told]), pa.array([error])], ["piece", "error"])
