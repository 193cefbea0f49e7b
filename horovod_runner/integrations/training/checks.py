"""Checks a training before anything is launched: its columns, and its model on a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.read.staging import arrow_schema
from horovod_runner.data.scoring.first_rows import first_rows
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.integrations.training.training import Training


def check_rows(training: Training, rows: DataFrame) -> None:
    """Check columns and model on the first rows.

    Raises:
        DataError: a column does not exist or cannot become a tensor, or there are no rows.
        TypeError: model or optimizer is of another kind.
        ValueError: the model does not fit the columns.
    """
    options = FeedOptions(
        framework=training.framework, columns=training.columns, **training.options
    )
    try:
        inputs = Inputs.of(arrow_schema(rows), options)
    except DataError as error:
        raise DataError(
            f"{error}. The columns are those of feature_cols (or featuresCol), label_cols (or "
            "labelCol) and sample_weight_col (or weightCol)"
        ) from error.__cause__
    for name in training.labels:
        label = inputs.columns[name]
        if not label.is_fixed and (label.kind in ("text", "bytes") or label.is_ragged_text):
            raise ValueError(
                f"the label {name!r} is {inputs.columns[name].kind}, and a loss takes numbers: "
                "index it first, pyspark.ml.feature.StringIndexer, or set labelCol to another "
                "column"
            )
    first = first_rows(rows, inputs)
    if first is None:
        raise DataError(
            "there are no rows without nulls to train with: check the query and validation. In "
            "a Pipeline, pyspark.ml.feature.Imputer replaces nulls"
        )
    training.check(inputs.settle(first).arrays(first))
