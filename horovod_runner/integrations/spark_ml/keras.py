"""KerasEstimator and KerasModel: Keras 3 in Spark ML, on its TensorFlow and torch backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import keras

from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.keras import KerasKind, input_names, read_model
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator
from horovod_runner.integrations.spark_ml.model import TrainedModel
from horovod_runner.integrations.spark_ml.params import EstimatorOptions
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingFunction, TrainingPlan


class _KerasFile(Saveable):
    """Saves the Param ``model`` in Keras's format."""

    _files = ("model",)

    def _write_file(self, name: str, path: Path) -> None:
        model = self.getOrDefault(name)
        KerasKind.of(model).write(model, path, ())

    def _read_file(self, name: str, path: Path) -> Any:
        return read_model(path)


class KerasModel(_KerasFile, TrainedModel):
    """A trained Keras model; ``getModel()`` returns it."""

    def _kind(self) -> KerasKind:
        return KerasKind.of(self.getOrDefault("model"))


class KerasEstimator(_KerasFile, HorovodEstimator):
    """Trains a Keras 3 model on a DataFrame, as Horovod ranks.

    For example::

        estimator = KerasEstimator(
            np=4,
            model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
            optimizer=keras.optimizers.Adam(1e-3),
            loss="mse",
            feature_cols=[["age", "income"]],
            labelCol="spent",
            epochs=5,
        )
        model = estimator.fit(df)

    Each entry of ``feature_cols`` is an input of the model: by name where the names are those of
    its inputs, otherwise in order. A model that is compiled needs no ``optimizer`` and ``loss``.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    framework: Framework = "tensorflow"

    def __init__(self, **params: Unpack[EstimatorOptions]) -> None:
        super().__init__(params)

    def _needs(self) -> tuple[str, ...]:
        model = self.value_of("model")
        return ("model",) if getattr(model, "compiled", False) else ("model", "optimizer", "loss")

    def _plan(self) -> TrainingPlan:
        plan = super()._plan()
        loss = plan.loss if plan.loss is not None else self.getOrDefault("model").loss
        return replace(plan, loss=loss, metrics={})

    def _train(self) -> TrainingFunction:
        return TrainingFunction("horovod_runner.integrations.spark_ml.keras_training")

    def _trained_objects(self) -> dict[str, Any]:
        model = self.getOrDefault("model")
        optimizer = self.value_of("optimizer") or model.optimizer
        if isinstance(optimizer, str):
            optimizer = keras.optimizers.get(optimizer)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"optimizer must be an optimizer of Keras or its name, not {optimizer!r}"
            )
        with temporary_folder("keras") as folder:
            path = Path(folder) / "model"
            self._model_kind().write(model, path, ())
            data = path.read_bytes()
        compiled = {
            "optimizer": keras.saving.serialize_keras_object(optimizer),
            "metrics": self.value_of("metrics"),
        }
        return {
            "model": data,
            "backend": keras.backend.backend(),
            "compiled": compiled,
        }

    def _model_kind(self) -> KerasKind:
        """How the model is written to a file."""
        return KerasKind.of(self.getOrDefault("model"))

    def _try(self, first: Mapping[str, Any], plan: TrainingPlan) -> None:
        model = self.getOrDefault("model")
        if not isinstance(model, keras.Model):
            raise TypeError(f"model must be a Keras model, not {type(model).__name__}")
        inputs: Any = {
            name: keras.KerasTensor((None, *first[name].shape[1:]), str(first[name].dtype))
            for name in plan.features
        }
        shapes = ", ".join(f"{name} {tensor.shape}" for name, tensor in inputs.items())
        if len(inputs) == 1:
            inputs = next(iter(inputs.values()))
        elif set(inputs) != set(input_names(model)):
            inputs = list(inputs.values())
        try:
            outputs = model.compute_output_spec(inputs)
        except Exception as error:  # whatever Keras or the user's layers raise
            raise ValueError(
                f"model does not fit the columns: {type(error).__name__}: {error}, on a batch of "
                f"{shapes}. Change feature_cols (or featuresCol) or dtypes, or the model"
            ) from error
        count = len(keras.tree.flatten(outputs))
        if count != len(plan.labels):
            raise ValueError(
                f"the model returns {count} outputs for {len(plan.labels)} labels: label_cols must "
                "name one label for each output"
            )

    def _trained_model(self, trained: Trained) -> KerasModel:
        network = keras.models.clone_model(self.getOrDefault("model"))
        network.set_weights(trained.weights)
        model = KerasModel()
        loss = self.value_of("loss") or self.getOrDefault("model").loss
        model._set(model=network, loss_name=loss_name(loss))
        return model


def loss_name(loss: Any) -> str:
    """The name of a loss; of the first of several. It says whether the loss takes logits."""
    if isinstance(loss, list | tuple):
        loss = loss[0]
    if isinstance(loss, dict):
        loss = next(iter(loss.values()))
    if isinstance(loss, str):
        return loss
    name = str(getattr(loss, "__name__", type(loss).__name__))
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return f"{name} with logits" if config.get("from_logits") else name
