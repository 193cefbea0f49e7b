"""Scores a table that is in this process's memory: pandas' or Arrow's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.scoring.models.kind import Call
from horovod_runner.data.scoring.outputs import OutputColumn, OutputType, named
from horovod_runner.data.scoring.scorer import OnError, Scorer, compute
from horovod_runner.errors import DataError


def score_table(
    table: pa.Table,
    call: Call,
    options: FeedOptions,
    outputs: tuple[OutputColumn, ...],
    *,
    fill_null: Any = None,
    ragged: Any = (),
    on_error: OnError = "raise",
) -> list[pa.ChunkedArray]:
    """The outputs of a model for all rows, as columns; with on_error="null" also the errors.

    Types of outputs that are missing come from the first rows. For the other arguments see
    :func:`horovod_runner.predict`.

    Raises:
        DataError: there are no rows, or a column cannot become a tensor.
        PredictionError: the model fails.
    """
    inputs = Inputs.of(table.schema, options, fill_null, ragged)
    batches = [inputs.columns_of(each) for each in table.combine_chunks().to_batches()]
    if not batches:
        raise DataError("the table has no rows to score")
    assert options.batch_size is not None  # noqa: S101 - predict has a default
    inputs = inputs.settle(batches[0])
    if any(output.type is None for output in outputs):
        outputs = _typed(batches[0], inputs, call, outputs)
    scorer = Scorer(inputs, call, outputs, options.batch_size, on_error)
    columns = list(zip(*scorer.columns(iter(batches)), strict=True))
    return [pa.chunked_array(list(column)) for column in columns]


def _typed(
    batch: pa.RecordBatch, inputs: Inputs, call: Call, outputs: tuple[OutputColumn, ...]
) -> tuple[OutputColumn, ...]:
    """The outputs with their types, by the first rows without nulls."""
    for name in inputs.names:
        if name not in inputs.fill_null:
            batch = batch.filter(batch.column(name).is_valid())
    first = batch.slice(0, 4)
    if not first.num_rows:
        raise DataError(
            "there are no rows without nulls to decide the types of the outputs by: give them, "
            "output={'p': 'float'}"
        )
    values = named(compute(call, inputs, inputs.arrays(first)), outputs, first.num_rows)
    return tuple(
        output if output.type else replace(output, type=OutputType.of(values[output.name]))
        for output in outputs
    )
