"""The Spark query that scores: a map over whole rows, or a function of the inputs alone.

    mapInArrow   the inputs and the kept columns travel to Python, and the kept ones back
    arrow_udf    the inputs travel to Python, and the outputs back; Spark puts aside a copy of each
                 row meanwhile (Spark 4.1)

Columns that are wide, and no inputs, make the second one faster.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import cloudpickle
import pyarrow as pa
from pyspark.sql import functions
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import (
    BooleanType,
    DateType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from horovod_runner.common.spark_session import (
    conf_of,
    current_python,
    let_idle_workers_live,
    map_in_arrow,
    quoted,
)
from horovod_runner.data.feed.options import Framework
from horovod_runner.data.pack.columns import refused_in
from horovod_runner.data.read.staging import arrow_schema
from horovod_runner.data.scoring.scorer import Scorer
from horovod_runner.errors import DataError, PredictionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Column with what is wrong with a row, where on_error is "null".
ERRORS: Final = "_horovod_runner_errors"
_MOST_BYTES: Final = 64 << 20  # of small record batches that are joined
# PyTorch alone maps 3,400 MiB on two cores.
_LEAST_MEBIBYTES: Final = 3072
_NARROW: Final = (NumericType, BooleanType, DateType, TimestampType)


def with_outputs(dataframe: DataFrame, scorer: Scorer, keep: Sequence[str]) -> DataFrame:
    """Score the rows of a DataFrame.

    Returns:
        The columns to ``keep``, the outputs, and with on_error="null" the column ERRORS.
    """
    added = [
        StructField(name, from_arrow_type(type_.arrow)) for name, type_ in scorer.outputs.items()
    ]
    if scorer.on_error == "null":
        added.append(StructField(ERRORS, StringType()))
    refused = refused_in(arrow_schema(dataframe))
    for name in keep:
        if keep.count(name) > 1:
            raise DataError(f"{refused[name]}, or leave both out of the result: keep=[...]")
    arrow_udf = getattr(functions, "arrow_udf", None)
    others = [field for field in dataframe.schema if field.name in {*keep} - {*scorer.inputs.names}]
    has_wide = any(not isinstance(field.dataType, _NARROW) for field in others)
    if arrow_udf is not None and (has_wide or len(others) > len(scorer.inputs.names)):
        return _by_function(dataframe, scorer, keep, added=added, arrow_udf=arrow_udf)
    for name in keep:
        if name in refused:  # whole rows travel to Python
            raise DataError(f"{refused[name]}. keep=[...] leaves columns out of the result")
    return _by_map(dataframe, scorer, keep, added)


def lift_limits(spark: SparkSession, framework: Framework) -> None:
    """Lift a session's limits that may end the query, which is run later; warn of the others."""
    idle = let_idle_workers_live(spark)
    if idle is not None:
        warnings.warn(
            "spark.sql.execution.pyspark.udf.killOnIdleTimeout was true, and is false in this "
            "session from now on: Spark would kill a Python worker that loads the model or scores "
            f"a batch for {idle} s (idleTimeoutSeconds). After the query you may set it to true.",
            stacklevel=4,
        )
    memory = conf_of(spark, "spark.executor.pyspark.memory")
    if memory in (None, "0"):
        return
    advice = "Start the session without that setting, and ask for memory by "
    advice += "spark.executor.memoryOverhead."
    if framework != "numpy" and _mebibytes(memory) < _LEAST_MEBIBYTES:
        raise PredictionError(
            f"spark.executor.pyspark.memory={memory} limits the address space of Spark's Python "
            f"workers, and to load PyTorch or TensorFlow takes more than {_LEAST_MEBIBYTES} MiB of "
            f"it, most of which is never used. {advice}"
        )
    warnings.warn(
        f"spark.executor.pyspark.memory={memory} limits the address space of Spark's Python "
        "workers, of all tasks of an executor together. A framework maps 4 GiB and more, most of "
        "which it never uses. If a task fails with 'failed to map segment', a MemoryError or a "
        f"crash: {advice}",
        stacklevel=4,
    )


def _mebibytes(setting: str) -> float:
    """The value of a setting of Spark's that counts in MiB; infinite if it cannot be read."""
    found = re.fullmatch(r"(\d+)\s*([kmgtp]?)b?", setting.strip().lower())
    if found is None:
        return math.inf
    return int(found[1]) * float(1024 ** ("kmgtp".index(found[2] or "m") - 1))


def _by_function(
    dataframe: DataFrame,
    scorer: Scorer,
    keep: Sequence[str],
    *,
    added: list[Any],
    arrow_udf: Callable[..., Any],
) -> DataFrame:
    pickled, inputs = cloudpickle.dumps(scorer), scorer.inputs.names
    outputs = [field.name for field in added]

    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        yield from _structs(pickled, inputs, outputs, batches)

    with current_python(dataframe.sparkSession):
        # Nondeterministic: otherwise a filter on an output would compute the outputs twice.
        function = arrow_udf(score, StructType(added)).asNondeterministic()
        result = f"_{uuid4().hex[:8]}"
        scored = dataframe.select(
            "*", function(*scorer.inputs.expressions(dataframe)).alias(result)
        )
    return scored.select(
        *(functions.col(quoted(name)) for name in keep),
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
    for columns in scorer.columns(_joined(rows, scorer.batch_size)):
        yield pa.StructArray.from_arrays(columns, outputs)


def _by_map(
    dataframe: DataFrame, scorer: Scorer, keep: Sequence[str], added: list[Any]
) -> DataFrame:
    inputs = scorer.inputs
    fields = [field for field in dataframe.schema if field.name in keep]
    names = [field.name for field in fields]
    # Kept columns serve as inputs where they are; other inputs come behind.
    behind = [name for name in inputs.names if name not in names]
    rows = dataframe
    if behind or len(names) < len(dataframe.schema):  # each column is some calls to Java
        more = dict(zip(inputs.names, inputs.expressions(dataframe), strict=True))
        kept = [functions.col(quoted(name)) for name in names]
        rows = dataframe.select(*kept, *(more[name] for name in behind))
    # Numbers for names: mapInArrow takes a dot in a name for a field of a struct.
    rows = rows.toDF(*map(str, range(len(names) + len(behind))))
    places = [(names + behind).index(name) for name in inputs.names]
    schema = StructType([StructField(str(at), field.dataType) for at, field in enumerate(fields)])
    for at, field in enumerate(added, len(names)):
        schema = schema.add(str(at), field.dataType)
    scored = map_in_arrow(
        rows, partial(_rows, cloudpickle.dumps(scorer), places, len(names)), schema
    )
    return scored.toDF(*names, *(field.name for field in added))


def _rows(
    pickled: bytes, places: list[int], width: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Score in a Python worker: whole rows become rows with the outputs behind them."""
    scorer: Scorer = cloudpickle.loads(pickled)
    waiting: list[pa.RecordBatch] = []

    def inputs() -> Iterator[pa.RecordBatch]:
        for batch in _joined(batches, scorer.batch_size):
            waiting.append(batch)
            columns = [batch.column(place) for place in places]
            yield pa.RecordBatch.from_arrays(columns, scorer.inputs.names)

    for columns in scorer.columns(inputs()):
        kept = waiting.pop().columns[:width]
        arrays = [*kept, *columns]
        yield pa.RecordBatch.from_arrays(arrays, [str(at) for at in range(len(arrays))])


def _joined(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Join record batches with fewer rows than the model gets at a time.

    Spark's settings (arrow.maxRecordsPerBatch, maxBytesPerBatch) may make them small. They stay
    small where rows are wide.
    """
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        count = sum(each.num_rows for each in waiting)
        if count < rows and sum(each.nbytes for each in waiting) < _MOST_BYTES:
            continue
        *others, last = _as_one(waiting)
        # What is left of several begins the next one.
        left = last.num_rows % rows if len(waiting) > 1 and count >= rows else 0
        yield from others
        yield last.slice(0, last.num_rows - left)
        waiting = [last.slice(last.num_rows - left)] if left else []
    yield from _as_one(waiting)


def _as_one(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """One record batch of several; more only where Arrow's types cannot hold so much."""
    if len(batches) < 2:
        return batches
    table = pa.Table.from_batches(batches).combine_chunks()
    return table.to_batches() if len(table) else batches[:1]
