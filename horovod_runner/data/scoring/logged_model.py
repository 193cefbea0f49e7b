"""Logs a model to MLflow, so that it takes the columns of a DataFrame and returns its outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa

from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.scoring import model_file
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.scoring.models.kind import Call, ModelKind
from horovod_runner.data.scoring.outputs import OutputSpec, named, parse_outputs, types_of
from horovod_runner.data.scoring.scorer import compute
from horovod_runner.errors import SerializationError

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo

_MODEL = "model"


class ColumnsModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """A model in MLflow's words: a pandas DataFrame with the input columns in, outputs back."""

    def __init__(self, kind: ModelKind, inputs: Inputs, outputs: Iterable[str]) -> None:
        self._kind = kind
        self._inputs = inputs
        self._outputs = list(outputs)
        self._call: Call | None = None

    def load_context(self, context: Any) -> None:
        """Load the model; MLflow calls it once."""
        self._call = self._kind.load(Path(context.artifacts[_MODEL]), "cpu")

    def predict(self, context: Any, model_input: Any, params: Any = None) -> pd.DataFrame:
        """The outputs for some rows, as a pandas DataFrame."""
        assert self._call is not None  # noqa: S101 - MLflow has loaded it
        columns = [pa.array(model_input[name]) for name in self._inputs.names]
        batch = pa.RecordBatch.from_arrays(columns, self._inputs.names)
        parts = self._inputs.arrays(batch)
        return _frame(named(compute(self._call, self._inputs, parts), self._outputs, len(batch)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None}


def _frame(values: Mapping[str, Any]) -> pd.DataFrame:
    return pd.DataFrame({name: _cells(value) for name, value in values.items()})


def _cells(values: Any) -> Any:
    """An output as a pandas column: numbers, or a list in each row."""
    if isinstance(values, np.ndarray) and values.shape[1:] == (1,):
        return values.reshape(len(values))
    return list(values) if np.ndim(values) > 1 else values


def log_model(
    name: str,
    kind: ModelKind,
    model: Any,
    options: FeedOptions,
    *,
    example: pa.RecordBatch,
    output: OutputSpec,
    registered_model_name: str | None = None,
) -> ModelInfo:
    """Log a model to the active run of MLflow, or to a new one; ``example`` are some rows.

    Returns:
        What MLflow knows of the model; ``model_uri`` is what ``mlflow.pyfunc.load_model``,
        ``mlflow.pyfunc.spark_udf`` and :func:`horovod_runner.predict` take.

    Raises:
        DataError: a column does not exist, or cannot become a tensor.
        PredictionError: the model fails on the example.
        SerializationError: the model cannot be written to a file.
    """
    inputs = Inputs.of(example.schema, options)
    batch = inputs.columns_of(example)
    inputs = inputs.settle(batch)
    path = model_file.keep(kind, model, ())
    outputs = parse_outputs(output)
    call = kind.load(path, "cpu")
    values = named(compute(call, inputs, inputs.arrays(batch)), outputs, batch.num_rows)
    types_of(outputs, values)  # raises if a value cannot be a column
    frame = batch.to_pandas()
    named_as = "name" if int(mlflow.__version__.partition(".")[0]) >= 3 else "artifact_path"
    try:
        return mlflow.pyfunc.log_model(
            **{named_as: name},
            python_model=ColumnsModel(kind, inputs, outputs),
            artifacts={_MODEL: str(path)},
            signature=mlflow.models.infer_signature(frame, _frame(values)),
            input_example=frame,
            pip_requirements=requirements(model),
            registered_model_name=registered_model_name,
        )
    except (TypeError, AttributeError) as error:
        raise SerializationError(f"MLflow cannot keep the model {name!r}: {error}") from error


def requirements(model: Any) -> list[str]:
    """The packages that define a model, with their versions, and those that load it."""
    classes: set[type] = {type(model)}
    if hasattr(model, "modules"):
        classes |= {type(module) for module in model.modules()}
    if hasattr(model, "_flatten_layers"):
        classes |= {type(layer) for layer in model._flatten_layers()}
    tops = {base.__module__.partition(".")[0] for kind in classes for base in kind.__mro__}
    if "keras" in tops:
        tops.add(sys.modules["keras"].backend.backend())
    homes = metadata.packages_distributions()
    names = {home for top in tops for home in homes.get(top, ())}
    names |= {"horovod_runner", "cloudpickle", "numpy", "pandas", "pyarrow"}
    return sorted(f"{name}=={metadata.version(name)}" for name in names)
