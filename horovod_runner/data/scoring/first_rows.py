"""Tries a model on a DataFrame's first rows, which decides the types of inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from horovod_runner.data.read.staging import head
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.scoring.models.kind import Call
from horovod_runner.data.scoring.outputs import Outputs, OutputType, named, types_of
from horovod_runner.data.scoring.scorer import OnError, compute
from horovod_runner.errors import DataError, PredictionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS: Final = 4


def try_first_rows(
    dataframe: DataFrame,
    inputs: Inputs,
    outputs: Outputs,
    call: Call,
    on_error: OnError,
) -> tuple[Inputs, dict[str, OutputType]]:
    """Decide the types of inputs and outputs by the first rows, in this process.

    If the columns' types alone decide what the model gets, it is tried on zeros first, which takes
    no Spark job. A stream and an empty DataFrame have no first rows. With on_error="null" a row
    that fails is passed over.

    Raises:
        DataError: the rows cannot become inputs, or there are none to decide by.
        PredictionError: the model fails, or its outputs do not fit.
    """
    by_name = _by_types(inputs, outputs, call)
    if by_name is None:
        first = None if dataframe.isStreaming else first_rows(dataframe, inputs)
        if first is None:
            values, rows = _on_zeros(dataframe, inputs, call), _ROWS
        else:
            inputs = inputs.settle(first)
            values, rows = on_rows(first, inputs, call, on_error)
        by_name = named(values, outputs, rows)
    types = types_of(outputs, by_name)
    for name, type_ in types.items():
        type_.to_arrow(name, by_name[name])  # refuses values that do not fit
    return inputs, types


def _by_types(inputs: Inputs, outputs: Outputs, call: Call) -> dict[str, Any] | None:
    """What the model returns for zeros; None if they say nothing: rows have to decide."""
    try:
        zeros = inputs.zeros(_ROWS) if inputs.settled else None
        if zeros is None:
            return None
        return named(compute(call, inputs, zeros), outputs, _ROWS)
    except (DataError, PredictionError):  # it may take real rows all the same
        return None


def on_rows(
    first: pa.RecordBatch, inputs: Inputs, call: Call, on_error: OnError
) -> tuple[Any, int]:
    """What the model returns for the first rows, or for the first that does not fail."""
    try:
        return compute(call, inputs, inputs.arrays(first)), first.num_rows
    except (DataError, PredictionError):
        for at in range(first.num_rows) if on_error == "null" else ():
            try:
                return compute(call, inputs, inputs.arrays(first.slice(at, 1))), 1
            except (DataError, PredictionError):
                continue
        raise


def _on_zeros(dataframe: DataFrame, inputs: Inputs, call: Call) -> Any:
    why = "a stream" if dataframe.isStreaming else "empty, or has a null in each row"
    advice = "give the types of the outputs, output={'p': 'float'}"
    try:
        zeros = inputs.zeros(_ROWS)
        if zeros is not None:
            return compute(call, inputs, zeros)
    except (DataError, PredictionError) as error:
        raise PredictionError(
            f"the DataFrame is {why}, so the model was tried on zeros: {error}. If it does not "
            f"take zeros, {advice}"
        ) from error.__cause__
    raise DataError(f"the DataFrame is {why}, and the columns have no fixed shape: {advice}")


def first_rows(dataframe: DataFrame, inputs: Inputs) -> pa.RecordBatch | None:
    """Some rows without nulls, with the columns of ``inputs``; None if there are none."""
    from pyspark.sql import functions

    columns = [column.alias(f"_{at}") for at, column in enumerate(inputs.expressions(dataframe))]
    some = dataframe.select(*columns)
    for at, name in enumerate(inputs.names):
        if name not in inputs.fill_null:
            some = some.filter(functions.col(f"_{at}").isNotNull())
    batch = head(some, _ROWS)
    return None if batch is None else pa.RecordBatch.from_arrays(batch.columns, inputs.names)
