"""LightningEstimator and LightningModel: Lightning modules in Spark ML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from horovod_runner.data.feed.options import Framework
from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator
from horovod_runner.integrations.spark_ml.params import EstimatorOptions, declare, with_accessors
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingFunction, TrainingPlan
from horovod_runner.integrations.spark_ml.torch import TorchModel, with_weights


class LightningOptions(EstimatorOptions, total=False):
    """The arguments of a LightningEstimator."""

    trainer_options: Mapping[str, Any]


class LightningModel(TorchModel):
    """A trained Lightning module; ``getModel()`` returns it."""


@with_accessors
class LightningEstimator(HorovodEstimator):
    """Trains a Lightning module on a DataFrame, as Horovod ranks.

    The module's ``training_step`` gets a dict of tensors by column name, and makes its own loss and
    optimizer: ``optimizer``, ``loss`` and ``metrics`` are not used. ``transform`` calls its
    ``forward`` with the features.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    framework: Framework = "torch"
    trainer_options = declare("trainer_options", "further arguments of lightning.Trainer")

    def __init__(self, **params: Unpack[LightningOptions]) -> None:
        super().__init__(params)

    def _needs(self) -> tuple[str, ...]:
        return ("model",)

    def _train(self) -> TrainingFunction:
        return TrainingFunction("horovod_runner.integrations.spark_ml.lightning_training")

    def _trained_objects(self) -> dict[str, Any]:
        return {
            "model": self.getOrDefault("model"),
            "trainer_options": dict(self.value_of("trainer_options") or {}),
        }

    def _try(self, first: Mapping[str, Any], plan: TrainingPlan) -> None:
        model = self.getOrDefault("model")
        if not hasattr(model, "training_step"):
            raise TypeError(f"model must be a Lightning module, not {type(model).__name__}")

    def _trained_model(self, trained: Trained) -> LightningModel:
        model = LightningModel()
        model._set(model=with_weights(self.getOrDefault("model"), trained))
        return model
