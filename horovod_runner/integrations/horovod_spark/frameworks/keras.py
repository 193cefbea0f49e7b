"""``horovod.spark.keras``: KerasEstimator and KerasModel, on Keras 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import keras

from horovod_runner.data.scoring.models.keras import KerasKind, read_model
from horovod_runner.integrations.horovod_spark.batches import Arrange, in_order
from horovod_runner.integrations.horovod_spark.estimator import HorovodEstimator
from horovod_runner.integrations.horovod_spark.frameworks.store_trainings import StoreKerasTraining
from horovod_runner.integrations.horovod_spark.kinds import NamesKind
from horovod_runner.integrations.horovod_spark.model import HorovodModel
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.spark_ml.params import with_params
from horovod_runner.integrations.spark_ml.persistence import Saveable

if TYPE_CHECKING:
    from horovod_runner.data.scoring.models.kind import ModelKind
    from horovod_runner.integrations.training.training import Trained, Training

__all__ = ["EstimatorParams", "KerasEstimator", "KerasModel"]


_CUSTOM_OBJECTS: Final = {"custom_objects": "classes and functions of the model, by name"}


class _NamesKerasFile(Saveable):
    """Saves the Param ``model`` in Keras's format."""

    _read_model = staticmethod(read_model)

    def _kind(self) -> ModelKind:
        return NamesKind(KerasKind.of(self.getCustomObjects()))


@with_params(
    {
        **_CUSTOM_OBJECTS,
        "checkpoint_callback": (
            "a callback that saves models; the model that it saved last is the one that fit returns"
        ),
        "backend_env": "environment variables for the ranks",
    }
)
class KerasEstimator(_NamesKerasFile, HorovodEstimator):
    """Trains a Keras model on a DataFrame, as ``horovod.spark.keras.KerasEstimator``.

    Columns get the shapes of the model's inputs and outputs. The optimizer's learning rate is
    multiplied by the number of ranks, unless it follows a schedule.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    prefix = "keras"
    _own_defaults: ClassVar = {"custom_objects": {}, "checkpoint_callback": None, "backend_env": {}}

    def _needs(self) -> Sequence[str]:
        return () if getattr(self.getModel(), "compiled", False) else ("optimizer", "loss")

    def _environment(self) -> dict[str, str]:
        return dict(self.getBackendEnv())

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """The shapes of the model's inputs and outputs, with -1 for the rows."""
        model = self.getModel()
        return shapes_of(model, "inputs"), shapes_of(model, "outputs")

    def _training(self, logs: str | None, **arguments: Any) -> Training:
        # In order, whatever the names of the model's inputs are.
        inputs = in_order(self.getFeatureCols())
        training = StoreKerasTraining(
            **arguments,
            features=inputs,
            custom_objects=self.getCustomObjects(),
            checkpoint_callback=self.getCheckpointCallback(),
            logs=logs,
        )
        input_shapes, outputs = self.get_model_shapes()
        arrange = Arrange.of_training(
            training,
            input_shapes=input_shapes,
            label_shapes=self.getLabelShapes() or outputs,
            dtypes=dtypes_of(self.getModel(), inputs),
            row=self.getTransformationFn(),
        )
        return replace(training, options={"transform": arrange})

    def _create_model(
        self, network: Any, trained: Trained, epochs_before: int, run_id: str, metadata: Any
    ) -> Any:
        theirs = self.getModel()
        optimizer = keras.optimizers.get(self.getOptimizer() or theirs.optimizer)
        network.compile(
            type(optimizer).from_config(optimizer.get_config()),
            loss=self.getLoss() or theirs.loss,
            loss_weights=self.getLossWeights(),
            metrics=self.getMetrics() or None,
        )
        # It may begin with the last epoch of an earlier training with this id.
        own = int(self.getEpochs())
        history = {name: list(values)[-own:] for name, values in trained.history.items()}
        kwargs = self._get_model_kwargs(network, history, run_id, metadata, keras.config.floatx())
        return self.get_model_class()(**kwargs)

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


def shapes_of(model: Any, side: str) -> list[list[int]]:
    """The shapes of a model's inputs or outputs, with -1 for the rows; empty if it has none."""
    return [[-1 if size is None else size for size in each.shape] for each in _tensors(model, side)]


def dtypes_of(model: Any, parts: Mapping[str, str]) -> dict[str, str]:
    """The types of a model's inputs of numbers, by part."""
    types = [str(tensor.dtype) for tensor in _tensors(model, "inputs")]
    return {part: type_ for part, type_ in zip(parts, types, strict=False) if type_ != "string"}


def _tensors(model: Any, side: str) -> Sequence[Any]:
    try:
        return getattr(model, side) or ()
    except (AttributeError, ValueError):  # a subclass, or a Sequential that is not built
        return ()


@with_params({**_CUSTOM_OBJECTS, "_floatx": "Keras's type of numbers"})
class KerasModel(_NamesKerasFile, HorovodModel):
    """A trained Keras model, as ``horovod.spark.keras.KerasModel``; ``getModel()`` returns it.

    Args:
        params: the Params, by name: see ``explainParams()``.
    """

    _own_defaults: ClassVar = {"custom_objects": {}, "_floatx": None}

    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        model = self.getModel()
        shapes: Sequence[Sequence[int]] = shapes_of(model, "inputs")
        return Arrange(columns, dict(zip(columns, shapes, strict=False)), dtypes_of(model, columns))
