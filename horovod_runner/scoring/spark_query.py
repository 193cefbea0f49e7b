"""The Spark query that scores: an Arrow function, or a map over whole rows on Spark before 4.1.

From Spark 4.1 on (``arrow_udf``) only the model's inputs travel to Python, and only its outputs
back. Before (``mapInArrow``) all columns travel, there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import cloudpickle
import pyarrow as pa

from horovod_runner.common.spark_session import current_python, map_in_arrow
from horovod_runner.scoring.inputs import quoted
from horovod_runner.scoring.scorer import Scorer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Column with what is wrong with a row, where on_error is "null".
ERRORS: Final = "_horovod_runner_errors"


def with_outputs(dataframe: DataFrame, scorer: Scorer) -> DataFrame:
    """The DataFrame with the outputs behind its columns, and with on_error="null" with ERRORS."""
    added = [(output.name, output.type.ddl) for output in scorer.outputs if output.type is not None]
    if scorer.on_error == "null":
        added.append((ERRORS, "string"))
    try:
        from pyspark.sql.functions import arrow_udf
    except ImportError:  # Spark before 4.1
        return _by_map(dataframe, scorer, added)
    return _by_function(dataframe, scorer, added, arrow_udf)


def _by_function(
    dataframe: DataFrame,
    scorer: Scorer,
    added: list[tuple[str, str]],
    arrow_udf: Callable[..., Any],
) -> DataFrame:
    from pyspark.sql import functions

    names = [field.name for field in dataframe.schema]
    fields = ", ".join(f"{quoted(name)}: {type_}" for name, type_ in added)
    pickled, inputs, outputs = cloudpickle.dumps(scorer), scorer.inputs.names, [n for n, _ in added]

    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        yield from _structs(pickled, inputs, outputs, batches)

    with current_python(dataframe.sparkSession):
        # Nondeterministic: otherwise a filter on an output would compute the outputs twice.
        function = arrow_udf(score, f"struct<{fields}>").asNondeterministic()
        result = f"_{uuid4().hex[:8]}"
        scored = dataframe.select(
            "*", function(*scorer.inputs.expressions(dataframe)).alias(result)
        )
    return scored.select(
        *(functions.col(quoted(name)) for name in names),
        *(functions.col(result).getField(name).alias(name) for name in outputs),
    )


def _structs(
    pickled: bytes,
    inputs: list[str],
    outputs: list[str],
    batches: Iterator[tuple[pa.Array, ...]],
) -> Iterator[pa.Array]:
    """Score in a Python worker: arrays of the inputs become one array of structs."""
    scorer: Scorer = cloudpickle.loads(pickled)
    rows = (
        pa.RecordBatch.from_arrays(list(arrays) if len(inputs) > 1 else [arrays], inputs)
        for arrays in batches
    )
    for columns in scorer.columns(rows):
        yield pa.StructArray.from_arrays(columns, outputs)


def _by_map(dataframe: DataFrame, scorer: Scorer, added: list[tuple[str, str]]) -> DataFrame:
    from pyspark.sql.types import StructField, StructType, _parse_datatype_string

    fields = list(dataframe.schema)
    names = [field.name for field in fields]
    # Numbers for names: mapInArrow takes a dot in a name for a field of a struct.
    kept = [column.alias(str(at)) for at, column in enumerate(_all(names))]
    # Columns of the DataFrame serve as inputs where they are; fields of structs come behind.
    nested = [name for name in scorer.inputs.names if name not in names]
    expressions = dict(zip(scorer.inputs.names, scorer.inputs.expressions(dataframe), strict=True))
    behind = [expressions[name].alias(str(len(names) + at)) for at, name in enumerate(nested)]
    places = [(names + nested).index(name) for name in scorer.inputs.names]
    schema = StructType(
        [StructField(str(at), field.dataType, True) for at, field in enumerate(fields)]
        + [
            StructField(str(len(fields) + at), _parse_datatype_string(type_), True)
            for at, (_, type_) in enumerate(added)
        ]
    )
    pickled, width = cloudpickle.dumps(scorer), len(names)

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _rows(pickled, places, width, batches)

    scored = map_in_arrow(dataframe.select(*kept, *behind), score, schema)
    return scored.toDF(*names, *(name for name, _ in added))


def _all(names: list[str]) -> list[Any]:
    from pyspark.sql import functions

    return [functions.col(quoted(name)) for name in names]


def _rows(
    pickled: bytes, places: list[int], width: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Score in a Python worker: whole rows become rows with the outputs behind them."""
    scorer: Scorer = cloudpickle.loads(pickled)
    waiting: list[pa.RecordBatch] = []

    def inputs() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            waiting.append(batch)
            columns = [batch.column(place) for place in places]
            yield pa.RecordBatch.from_arrays(columns, scorer.inputs.names)

    for columns in scorer.columns(inputs()):
        kept = waiting.pop().columns[:width]
        arrays = [*kept, *columns]
        yield pa.RecordBatch.from_arrays(arrays, [str(at) for at in range(len(arrays))])
