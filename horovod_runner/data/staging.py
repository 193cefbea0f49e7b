"""A DataFrame becomes packed pieces in a folder that driver and executors share.

    DataFrame --mapInArrow--> one piece per partition --> Pieces

No barrier, no shuffle: it is the DataFrame's own job, with packing as its last step.
"""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import pyarrow as pa

from horovod_runner.data import columns as cols
from horovod_runner.data.columns import Column
from horovod_runner.data.readers import Pieces, pack_batch
from horovod_runner.data.store import Chunk, Layout, Writer, write_layout
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEMA = "told binary, error string"
_SAMPLE_BYTES = 1 << 10


class _Told(msgspec.Struct):
    """What a task tells of its piece.

    Attributes:
        lengths: the shortest and the longest row of each list.
        sample: a checksum of a sample of the rows.
    """

    part: int
    name: str
    layout: Layout
    lengths: dict[str, tuple[int, int]] = {}
    sample: int = 0


def stage(frame: DataFrame, name: str, folder: Path) -> Pieces:
    """Write a DataFrame's rows.

    Args:
        frame: the DataFrame.
        name: what the user calls it, for messages.
        folder: on storage that all executors and this process share.

    Raises:
        DataError: a column cannot become a tensor, has nulls, or there is too little room.
    """
    schema = arrow_schema(frame)
    try:
        cols.choose(schema)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    task = partial(write_piece, folder)
    told = []
    for row in frame.mapInArrow(task, _SCHEMA).collect():
        if row["error"]:
            raise DataError(f"{name}: {row['error']}")
        told.append(msgspec.msgpack.decode(bytes(row["told"]), type=_Told))
    return _joined(sorted(told, key=lambda one: one.part), schema, folder)


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """A DataFrame's schema as Arrow sees it.

    Raises:
        DataError: Arrow has no such type.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(frame.schema)
    except Exception as error:  # pyspark's own kinds, which differ from release to release
        raise DataError(f"a column cannot be turned into Arrow: {error}") from error


def write_piece(folder: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The Spark task: write a partition, and tell in one row where it is."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None  # noqa: S101 - Spark runs this
    part = context.partitionId()
    # A name of its own: a task that Spark runs twice must not meet the other's files.
    told, error = _Told(part, f"piece-{part}-{uuid4().hex[:8]}", Layout([], [0])), ""
    try:
        write_batches(folder, told, batches)
    except DataError as found:
        error = str(found)
    except OSError as found:
        error = (
            f"a piece could not be written to {folder} by an executor: {found}. It is a folder "
            "that the driver and all executors share, with room for the whole dataset: data_dir"
        )
    if error:
        shutil.rmtree(folder / told.name, ignore_errors=True)
    yield pa.RecordBatch.from_arrays(
        [pa.array([msgspec.msgpack.encode(told)]), pa.array([error])], ["told", "error"]
    )


def write_batches(folder: Path, told: _Told, batches: Iterator[pa.RecordBatch]) -> None:
    """Pack batches into a store of one unit, and take down what there is to tell of it.

    Raises:
        DataError: a column has nulls.
        OSError: the disk is full.
    """
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return
    # Lists stay lists here: which of them are vectors is known when all pieces are there.
    columns = [cols.settle(c, first, lists=False) for c in cols.choose(first.schema).values()]
    layout = Layout(columns, [])
    (folder / told.name).mkdir(mode=0o700)
    with Writer(folder / told.name, layout) as writer:
        for batch in chain([first], batches):
            chunk = pack_batch(batch, layout, {})
            writer.append(chunk)
            _take_down(told, chunk)
    told.layout = Layout(columns, [writer.rows])
    write_layout(folder / told.name, told.layout)


def _take_down(told: _Told, chunk: Chunk) -> None:
    for name, rows in chunk.ragged.items():
        if rows.lengths is not None and len(rows.lengths):
            low, high = int(rows.lengths.min()), int(rows.lengths.max())
            before = told.lengths.get(name, (low, high))
            told.lengths[name] = min(low, before[0]), max(high, before[1])
    for array in [*chunk.matrices, *(rows.values for rows in chunk.ragged.values())]:
        told.sample = zlib.crc32(array[:1].tobytes()[:_SAMPLE_BYTES], told.sample)


def _joined(told: Sequence[_Told], schema: pa.Schema, folder: Path) -> Pieces:
    there = [one for one in told if one.layout.rows]
    columns = []
    for name, unsettled in cols.choose(schema).items():
        kinds = {c for one in there for c in one.layout.columns if c.name == name}
        lengths = {n for one in there for n in one.lengths.get(name, ())}
        columns.append(_common(unsettled, kinds, lengths))
    described = repr([(o.layout.rows, o.layout.columns, o.sample) for o in there]).encode()
    return Pieces(
        folder,
        [one.name for one in there],
        [one.layout.rows for one in there],
        hashlib.blake2b(described, digest_size=8).hexdigest(),
        columns,
    )


def _common(unsettled: Column, kinds: set[Column], lengths: set[int]) -> Column:
    if unsettled.kind == "list" and len(lengths) == 1:
        return Column(unsettled.name, "vector", unsettled.dtype, tuple(lengths))
    if len(kinds) == 1:
        return kinds.pop()
    if unsettled.kind == "vector" and kinds:
        lengths = ", ".join(str(column.width) for column in kinds)
        raise DataError(f"column {unsettled.name!r} has vectors of {lengths} numbers")
    return unsettled
