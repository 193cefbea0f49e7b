"""Checks a training before anything is launched: its columns, and its model on a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.read.staging import arrow_schema
from horovod_runner.data.scoring.first_rows import first_rows
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.sources import DataFrameSource, Source
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.integrations.training.training import Training

_ROWS: Final = 4


def check_source(training: Training, source: Source) -> None:
    """Check columns and model on the first rows of a dataset; see :func:`check_rows`."""
    if isinstance(source, DataFrameSource):
        check_rows(training, source.dataframe)
    elif source.shows_rows:
        first = source.head(_ROWS)
        column = training.validation
        if isinstance(column, str) and column not in first.schema.names:
            raise DataError(
                f"validation={column!r} names a column, and the columns are "
                f"{', '.join(first.schema.names)}"
            )
        inputs = _inputs_of(training, first.schema)
        first = inputs.columns_of(first)
        for name in inputs.names:
            first = first.filter(first.column(name).is_valid())
        if first.num_rows:
            training.check(inputs.settle(first).arrays(first))


def check_rows(training: Training, rows: DataFrame) -> None:
    """Check columns and model on the first rows.

    Raises:
        DataError: a column does not exist or cannot become a tensor, or there are no rows.
        TypeError: model or optimizer is of another kind.
        ValueError: the model does not fit the columns.
    """
    inputs = _inputs_of(training, arrow_schema(rows))
    first = first_rows(rows, inputs)
    if first is None:
        raise DataError(
            "there are no rows without nulls to train with: check the query and validation. In "
            "a Pipeline, pyspark.ml.feature.Imputer replaces nulls"
        )
    training.check(inputs.settle(first).arrays(first))


def _inputs_of(training: Training, schema: pa.Schema) -> Inputs:
    options = FeedOptions(
        framework=training.framework, columns=training.columns or None, **training.feed_options
    )
    names = training.names
    try:
        inputs = Inputs.of(schema, options)
    except DataError as error:
        raise DataError(
            f"{error}. The columns are those of {names.features}, {names.labels} and {names.weight}"
        ) from error.__cause__
    for name in training.labels:
        if name in (options.images or {}):
            continue
        label = inputs.columns[name]
        if not label.is_fixed and (label.kind in ("text", "bytes") or label.is_ragged_text):
            raise ValueError(
                f"the label {name!r} is {label.kind}, and a loss takes numbers: "
                "index it first, pyspark.ml.feature.StringIndexer, or set "
                f"{names.labels} to another column"
            )
    return inputs
