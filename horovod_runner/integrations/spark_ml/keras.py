"""KerasEstimator and KerasModel: Keras 3 in Spark ML, on its TensorFlow and torch backends."""

from __future__ import annotations

from typing import Any

from horovod_runner.data.scoring.models.keras import KerasKind, read_model
from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator
from horovod_runner.integrations.spark_ml.model import TrainedModel
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.training.classes import loss_name
from horovod_runner.integrations.training.keras import KerasTraining


class _KerasFile(Saveable):
    """Saves the Param ``model`` in Keras's format."""

    _read_model = staticmethod(read_model)

    def _kind(self) -> KerasKind:
        return KerasKind.of()


class KerasModel(_KerasFile, TrainedModel):
    """A trained Keras model; ``getModel()`` returns it.

    Args:
        params: the Params, by name: see ``explainParams()`` and the base.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
        ValueError: see the base.
    """

    def _check_network(self, network: Any) -> None:
        import keras

        if not isinstance(network, keras.Model):
            raise TypeError(f"model must be a Keras model, not {type(network).__name__}")


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

    _model_class = KerasModel

    def _needs(self) -> tuple[str, ...]:
        model = self.value_of("model")
        return ("model",) if getattr(model, "compiled", False) else ("model", "optimizer", "loss")

    def _training(self, **arguments: Any) -> KerasTraining:
        return KerasTraining(**arguments)

    def _loss_name(self) -> str:
        return loss_name(self.value_of("loss") or self.getOrDefault("model").loss)
