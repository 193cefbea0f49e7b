"""predict: a DataFrame with a model's outputs as new columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

import pyarrow as pa

from horovod_runner.common.arguments import suggest_arguments
from horovod_runner.common.by_value import by_value
from horovod_runner.common.spark_session import quoted
from horovod_runner.data.feed.options import ALIASES, Columns, Dtypes, FeedOptions, PadRagged
from horovod_runner.data.pack.images import Image
from horovod_runner.data.read.staging import arrow_schema
from horovod_runner.data.read.tables import pandas_table, without_twins
from horovod_runner.data.scoring import model_file
from horovod_runner.data.scoring.first_rows import on_rows, try_first_rows
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.scoring.models.kind import Call, ModelKind
from horovod_runner.data.scoring.models.recognize import recognize
from horovod_runner.data.scoring.outputs import (
    Outputs,
    OutputSpec,
    OutputType,
    check_free,
    given_types,
    named,
    parse_outputs,
    types_of,
)
from horovod_runner.data.scoring.scorer import OnError, Scorer, with_postprocess
from horovod_runner.data.scoring.spark_query import ERRORS, lift_limits, with_outputs
from horovod_runner.data.sources import source_of
from horovod_runner.errors import DataError
from horovod_runner.host.gpus import local_device
from horovod_runner.host.scratch import temporary_folder

if TYPE_CHECKING:
    from pyspark.sql import Observation

#: A DataFrame of Spark or pandas, or an Arrow table.
Rows = TypeVar("Rows")

_ALIASES: Final = {
    **ALIASES,
    **dict.fromkeys(("outputs", "output_column", "prediction_col", "result_type"), "output"),
    **dict.fromkeys(("keep_columns", "passthrough"), "keep"),
}


@suggest_arguments(_ALIASES)
def predict(
    dataframe: Rows,
    model: Any,
    columns: Columns | None = None,
    output: OutputSpec = "prediction",
    *,
    batch_size: int = 4096,
    keep: Sequence[str] | None = None,
    build: Callable[[], Any] | None = None,
    dtypes: Dtypes | None = None,
    pad_ragged: PadRagged | None = None,
    images: Mapping[str, Image] | None = None,
    fill_null: Mapping[str, Any] | None = None,
    ragged: Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    postprocess: Callable[[Any], Any] | None = None,
    on_error: Literal["raise", "null"] = "raise",
    error_column: str | None = None,
    observation: Observation | None = None,
    device: str | None = None,
    ship_modules: Sequence[ModuleType] = (),
) -> Rows:
    """Add a model's outputs to a DataFrame, as columns.

        scored = predict(df, model, {"x": ["age", "income"]}, output="p")
        scored = predict(df, run.best_checkpoint, {"x": ["age", "income"]}, build=Net)

    Columns become the model's inputs by the code that feeds training, so ``columns``, ``dtypes``,
    ``pad_ragged`` and ``images`` mean what they mean in :meth:`horovod_runner.data.Shard.to_torch`.
    Like any DataFrame the result is computed when it is used; it may be a stream.

    The model is written to a file, which reaches each host once, and each of Spark's Python workers
    loads it once, onto the GPU that Spark gives the task, or the CPU.

    Args:
        dataframe: of classic Spark, Spark Connect or pandas, or an Arrow table. pandas and Arrow
            are scored in this process, and come back as what they are.
        model: a torch module, a Lightning module (its ``predict_step``, if it has one), a
            TorchScript or ``torch.export`` program, a Keras 3 model, the URI of a model in MLflow,
            a :class:`Checkpoint` together with ``build``, or a function from a dict of NumPy arrays
            to an array, a tuple or a dict of arrays. Torch and Keras models compute without
            gradients, in evaluation mode.
        columns: the model's inputs: a dict of names to one column, of shape (rows, ...), or to a
            list of columns side by side, of shape (rows, columns). A list of names makes each
            column an input; None takes all columns. Several inputs are passed by name if the names
            are those of the model's parameters, otherwise in order.
        output: the new column, a list of them, or a dict of names to Spark's types such as "float"
            or "array<float>" (None: not given). Where the model returns a dict, they name its
            entries. A type that is not given comes from the first rows, for which a small Spark job
            runs; one number per row is a number, not an array.
        batch_size: the most rows that the model gets at a time.
        keep: columns of the DataFrame that are in the result; None keeps all. Without a wide input,
            such as an image, less travels back from Python.
        build: returns the network, for a checkpoint of weights.
        dtypes: NumPy types to convert numbers to, by input, or one for all but images. None:
            float64 becomes float32 for torch and Keras, other types stay.
        pad_ragged: for ragged columns, by input: a number that fills up short rows, or (number,
            length).
        images: for columns of images: what they become, by column.
        fill_null: values that replace nulls, by column.
        ragged: lists that are not vectors, even if the first rows have one length.
        transform: called with each batch, a dict of NumPy arrays; what it returns replaces it.
        postprocess: called with what the model returns for a batch, tensors for a torch model and
            otherwise arrays; what it returns replaces that.
        on_error: "raise" ends the query at a row that cannot be scored: it has a null, a damaged
            image, or ``transform`` or the model fails on it. "null" leaves its outputs null.
        error_column: with ``on_error="null"``, a text column that says what is wrong with a row.
        observation: with ``on_error="null"``, counts "rows" and "bad_rows", as pyspark's
            Observation does.
        device: "cpu" or "cuda:0", instead of the task's.
        ship_modules: your own modules that the executors lack. Their functions and classes are
            pickled with the model.

    Returns:
        The kept columns, and the outputs behind them.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no weights of the network.
        DataError: a column does not exist, cannot become a tensor or has nulls.
        PredictionError: the model fails on the first rows, or returns another number of rows.
        SerializationError: the model cannot be sent to the executors.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or two contradict each other.
    """
    kind, model = recognize(model, build)
    outputs = parse_outputs(output)
    _check_errors(on_error, error_column, observation)
    rows: Any = dataframe
    result: Rows
    names = _kept(rows, keep)
    added = [*outputs, *([] if error_column is None else [error_column])]
    check_free(added, names)
    options = FeedOptions(
        framework=kind.framework,
        columns=columns,
        batch_size=batch_size,
        dtypes=dtypes,
        pad_ragged=pad_ragged,
        images=images,
        transform=transform,
    )
    if not hasattr(rows, "sparkSession"):
        if observation is not None:
            raise ValueError("observation counts the rows of a Spark query: leave it out")
        table = without_twins(rows) if isinstance(rows, pa.Table) else pandas_table(rows)
        inputs = Inputs.of(table.schema, options, fill_null, ragged)
        call = with_postprocess(_in_memory(kind, model, device), postprocess)
        scored = _score_table(
            table, inputs, outputs, call, batch_size=batch_size, on_error=on_error
        )
        # The errors come behind, also if the user wants no column of them.
        result = _beside(rows, names, dict(zip(added, scored, strict=False)))
        return result
    lift_limits(rows.sparkSession, kind.framework)
    inputs = Inputs.of(arrow_schema(rows), options, fill_null, ragged)
    path = model_file.keep(kind, model, ship_modules)
    types = given_types(outputs)
    if types is None:
        call = with_postprocess(kind.load(path, device or "cpu"), postprocess)
        inputs, types = try_first_rows(rows, inputs, outputs, call, on_error)
    shipped = model_file.ship(kind, path, rows.sparkSession)
    scorer = Scorer(inputs, shipped, types, batch_size, on_error, device or "", postprocess)
    with by_value(ship_modules):
        scored_rows = with_outputs(rows, scorer, names)
    result = _told(scored_rows, names, scorer, error_column, observation)
    return result


def _in_memory(kind: ModelKind, model: Any, device: str | None) -> Call:
    """A copy of the model, read from a file as in a task. The user's model does not change."""
    with temporary_folder("model") as folder:
        path = Path(folder) / "model"
        kind.write(model, path, ())
        return kind.load(path, device or local_device())


def _score_table(
    table: pa.Table,
    inputs: Inputs,
    outputs: Outputs,
    call: Call,
    *,
    batch_size: int,
    on_error: OnError,
) -> list[pa.ChunkedArray]:
    """The outputs for all rows, as columns; with on_error="null" also the errors."""
    batches = [inputs.columns_of(each) for each in table.combine_chunks().to_batches()]
    if not batches:
        raise DataError("the table has no rows to score")
    inputs = inputs.settle(batches[0])
    types = given_types(outputs) or _shown_types(batches[0], inputs, outputs, call, on_error)
    scorer = Scorer(inputs, call, types, batch_size, on_error)
    columns = zip(*scorer.columns(iter(batches)), strict=True)
    return [pa.chunked_array(list(column)) for column in columns]


def _shown_types(
    batch: pa.RecordBatch, inputs: Inputs, outputs: Outputs, call: Call, on_error: OnError
) -> dict[str, OutputType]:
    """The types of the outputs, by the first rows without nulls."""
    for name in inputs.names:
        if name not in inputs.fill_null:
            batch = batch.filter(batch.column(name).is_valid())
    first = batch.slice(0, 4)
    if not first.num_rows:
        raise DataError(
            "there are no rows without nulls to decide the types of the outputs by: give them, "
            "output={'p': 'float'}"
        )
    values, rows = on_rows(first, inputs, call, on_error)
    return types_of(outputs, named(values, outputs, rows))


def _beside(rows: Any, names: Sequence[str], outputs: Mapping[str, pa.ChunkedArray]) -> Any:
    """The kept columns of a table, and the outputs behind them."""
    if isinstance(rows, pa.Table):
        return pa.table({**{name: rows[name] for name in names}, **outputs})
    return rows[list(names)].assign(
        **{name: column.to_pandas().to_numpy() for name, column in outputs.items()}
    )


def _kept(dataframe: Any, keep: Sequence[str] | None) -> list[str]:
    """The columns of a DataFrame that stay, in its order.

    Raises:
        DataError: there is no such column.
        TypeError: ``keep`` is not a list of names, or the rows are not a DataFrame.
    """
    if source_of(dataframe) is None or not hasattr(dataframe, "columns"):  # or it is of files
        raise TypeError(
            f"predict takes a DataFrame of Spark or pandas, or an Arrow table, not {dataframe!r}. "
            "Read files first: spark.read.parquet(path), or pandas.read_parquet(path)"
        )
    is_pandas = not hasattr(dataframe, "schema")
    names = list(dataframe.columns if is_pandas else (field.name for field in dataframe.schema))
    if keep is None:
        return names
    if isinstance(keep, str) or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"keep must be a list of column names, not {keep!r}")
    for name in keep:
        if name not in names:
            raise DataError(f"keep names the column {name!r}: the columns are {', '.join(names)}")
    return [name for name in names if name in keep]


def _check_errors(on_error: str, error_column: str | None, observation: object) -> None:
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error must be 'raise' or 'null', not {on_error!r}")
    if on_error == "raise" and (error_column is not None or observation is not None):
        raise ValueError(
            "error_column and observation tell of rows that could not be scored, and "
            "on_error='raise' ends the query at the first: set on_error='null'"
        )


def _told(
    scored: Any,
    names: Sequence[str],
    scorer: Scorer,
    error_column: str | None,
    observation: Observation | None,
) -> Any:
    """The scored rows with the column of errors and the observation that the user wants."""
    if scorer.on_error == "raise":
        return scored
    from pyspark.sql import functions

    if observation is not None:
        bad = functions.count(functions.col(ERRORS)).alias("bad_rows")
        scored = scored.observe(observation, functions.count(functions.lit(1)).alias("rows"), bad)
    kept = [*names, *scorer.outputs]
    columns = [functions.col(quoted(name)) for name in kept]
    if error_column is not None:
        columns.append(functions.col(ERRORS).alias(error_column))
    return scored.select(*columns)
