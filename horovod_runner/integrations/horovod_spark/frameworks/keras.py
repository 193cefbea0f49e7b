"""``horovod.spark.keras``: KerasEstimator and KerasModel, on Keras 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from horovod_runner.data.scoring.models.keras import KerasKind, read_model
from horovod_runner.integrations import spark_ml as ml
from horovod_runner.integrations.horovod_spark.batches import Arrange
from horovod_runner.integrations.horovod_spark.estimator import HorovodEstimator
from horovod_runner.integrations.horovod_spark.kinds import NamesKind
from horovod_runner.integrations.horovod_spark.model import HorovodModel
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.horovod_spark.training import Launched, Training, arrange
from horovod_runner.integrations.spark_ml.params import declare, with_accessors
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.spark_ml.plan import TrainingFunction, TrainingPlan

if TYPE_CHECKING:
    from horovod_runner.data.scoring.models.kind import ModelKind
    from horovod_runner.integrations.spark_ml.model import TrainedModel

__all__ = ["EstimatorParams", "KerasEstimator", "KerasModel"]


class _KerasFile(Saveable):
    """Saves the Param ``model`` in Keras's format."""

    _files = ("model",)

    def _write_file(self, name: str, path: Path) -> None:
        kind_of(self).write(self.getOrDefault(name), path, ())

    def _read_file(self, name: str, path: Path) -> Any:
        return read_model(path)


def kind_of(holder: Any) -> KerasKind:
    """The kind of the model that an estimator or a model holds."""
    return KerasKind.of(holder.getModel(), holder.getCustomObjects())


@with_accessors
class KerasEstimator(_KerasFile, HorovodEstimator):
    """Trains a Keras model on a DataFrame, as ``horovod.spark.keras.KerasEstimator``.

    Columns get the shapes of the model's inputs and outputs. The optimizer's learning rate is
    multiplied by the number of ranks, unless it follows a schedule.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    prefix = "keras"
    library = "horovod_runner.integrations.keras"

    custom_objects = declare("custom_objects", "classes and functions of the model, by name")
    checkpoint_callback = declare(
        "checkpoint_callback",
        "a callback that saves models; the model that it saved last is the one that fit returns",
    )
    backend_env = declare("backend_env", "environment variables for the ranks")

    def _defaults(self) -> dict[str, Any]:
        return {"custom_objects": {}, "checkpoint_callback": None, "backend_env": {}}

    def _environment(self) -> dict[str, str]:
        return dict(self.getBackendEnv())

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """The shapes of the model's inputs and outputs, with -1 for the rows."""
        model = self.getModel()
        return shapes_of(model, "inputs"), shapes_of(model, "outputs")

    def _estimator(self, training: Training) -> Any:
        given = self._common(training)
        estimator = _Estimator(**given, metrics=self.getMetrics())
        estimator.training = training
        inputs, outputs = self.get_model_shapes()
        estimator.arrange = arrange(
            self,
            estimator.inputs,
            input_shapes=inputs,
            label_shapes=self.getLabelShapes() or outputs,
            dtypes=dtypes_of(self.getModel(), estimator.inputs),
        )
        return estimator

    def _create_model(
        self, fitted: TrainedModel, run_id: str, metadata: Mapping[str, Any], training: Training
    ) -> Any:
        network = fitted.getOrDefault("model")
        theirs = self.getModel()
        optimizer = keras.optimizers.get(self.getOptimizer() or theirs.optimizer)
        loss = self.getLoss() or theirs.loss
        network.compile(
            type(optimizer).from_config(optimizer.get_config()),
            loss=loss,
            loss_weights=self.getLossWeights(),
            metrics=self.getMetrics() or None,
        )
        kwargs = self._get_model_kwargs(
            network, dict(fitted.history), run_id, metadata, keras.config.floatx()
        )
        model = self.get_model_class()(**kwargs)
        model.run = fitted.run
        return model

    def get_model_class(self) -> type[Any]:
        """The class of the model that ``fit`` returns."""
        return KerasModel

    def _get_model_kwargs(
        self, model: Any, history: Any, run_id: str, metadata: Any, floatx: str
    ) -> dict[str, Any]:
        """The arguments of that class."""
        return {
            "history": history,
            "model": model,
            "feature_columns": self.getFeatureCols(),
            "label_columns": self.getLabelCols(),
            "custom_objects": self.getCustomObjects(),
            "run_id": run_id,
            "_metadata": metadata,
            "_floatx": floatx,
        }


class _Estimator(Launched, ml.KerasEstimator):
    """The estimator of `ml` that trains as Horovod's does."""

    def _model_kind(self) -> KerasKind:
        return kind_of(self.training.estimator)

    def _plan(self) -> TrainingPlan:
        plan = super()._plan()
        weights = plan.loss_weights
        return replace(plan, loss_weights=None if weights is None else list(weights))

    def _train(self) -> TrainingFunction:
        return TrainingFunction(
            "horovod_runner.integrations.horovod_spark.frameworks.keras_training"
        )

    def _trained_objects(self) -> dict[str, Any]:
        theirs = self.training.estimator
        return {
            **super()._trained_objects(),
            "checkpoint_callback": theirs.getCheckpointCallback(),
            "logs": self.training.logs,
        }


def shapes_of(model: Any, side: str) -> list[list[int]]:
    """The shapes of a model's inputs or outputs, with -1 for the rows; empty if it has none."""
    try:
        tensors = getattr(model, side)
    except (AttributeError, ValueError):  # a subclass, or a Sequential that is not built
        return []
    return [[-1 if size is None else size for size in tensor.shape] for tensor in tensors or ()]


def dtypes_of(model: Any, parts: Mapping[str, str]) -> dict[str, str]:
    """The types of a model's inputs of numbers, by part."""
    try:
        tensors = model.inputs or ()
    except (AttributeError, ValueError):
        tensors = ()
    types = [str(tensor.dtype) for tensor in tensors]
    return {part: type_ for part, type_ in zip(parts, types, strict=False) if type_ != "string"}


@with_accessors
class KerasModel(_KerasFile, HorovodModel):
    """A trained Keras model, as ``horovod.spark.keras.KerasModel``; ``getModel()`` returns it.

    Args:
        params: the Params, by name: see ``explainParams()``.
    """

    custom_objects = declare("custom_objects", "classes and functions of the model, by name")
    _floatx = declare("_floatx", "Keras's type of numbers")

    def _defaults(self) -> dict[str, Any]:
        return {"custom_objects": {}, "_floatx": None}

    def _kind(self) -> ModelKind:
        return NamesKind(kind_of(self))

    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        model = self.getModel()
        shapes: Sequence[Sequence[int]] = shapes_of(model, "inputs")
        return Arrange(columns, dict(zip(columns, shapes, strict=False)), dtypes_of(model, columns))
