"""LightningEstimator and LightningModel: Lightning modules in Spark ML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator
from horovod_runner.integrations.spark_ml.params import EstimatorOptions, set_named, with_params
from horovod_runner.integrations.spark_ml.torch import TorchModel
from horovod_runner.integrations.training.lightning import LightningTraining


class LightningOptions(EstimatorOptions, total=False):
    """The arguments of a LightningEstimator."""

    trainer_options: Mapping[str, Any]


class LightningModel(TorchModel):
    """A trained Lightning module; ``getModel()`` returns it.

    ``transform`` calls its ``forward``. The arguments are those of TorchModel.
    """

    def _check_network(self, network: Any) -> None:
        if not hasattr(network, "training_step"):
            raise TypeError(f"model must be a Lightning module, not {type(network).__name__}")


@with_params({"trainer_options": "further arguments of lightning.Trainer"})
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

    _model_class = LightningModel

    def __init__(self, **params: Unpack[LightningOptions]) -> None:
        super().__init__()
        set_named(self, params)

    def _needs(self) -> tuple[str, ...]:
        return ("model",)

    def _training(self, **arguments: Any) -> LightningTraining:
        options = dict(self.value_of("trainer_options") or {})
        return LightningTraining(**arguments, trainer_options=options)

    def _loss_name(self) -> str:
        return ""
