"""TorchEstimator and TorchModel: PyTorch in Spark ML."""

from __future__ import annotations

from typing import Any

from horovod_runner.data.scoring.models.torch import TorchKind, read_module
from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator
from horovod_runner.integrations.spark_ml.model import TrainedModel
from horovod_runner.integrations.training.metrics import metrics_of
from horovod_runner.integrations.training.torch import TorchTraining


class TorchModel(TrainedModel):
    """A trained torch module; ``getModel()`` returns it.

    Args:
        params: the Params, by name: see ``explainParams()`` and the base.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
        ValueError: see the base.
    """

    _read_model = staticmethod(read_module)

    def _check_network(self, network: Any) -> None:
        import torch

        if isinstance(network, torch.jit.ScriptModule):
            raise TypeError(
                "model is a TorchScript program, which a stage of a Pipeline cannot save: pass the "
                "module that it was made of, or score by horovod_runner.predict(df, model, ...)"
            )
        if not isinstance(network, torch.nn.Module):
            raise TypeError(f"model must be a torch module, not {type(network).__name__}")

    def _kind(self) -> TorchKind:
        return TorchKind("module")


class TorchEstimator(HorovodEstimator):
    """Trains a torch module on a DataFrame, as Horovod ranks.

    For example::

        estimator = TorchEstimator(
            np=4,
            model=Net(),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
            loss=torch.nn.CrossEntropyLoss(),
            feature_cols=[["age", "income"]],
            labelCol="bought",
            epochs=5,
        )
        model = estimator.fit(df)

    Each entry of ``feature_cols`` is an input of the module's ``forward``: by name where the names
    are those of its parameters, otherwise in order. Labels get the shape and the type that the loss
    takes. The last batch of an epoch may be smaller than the others; its gradients are averaged
    over its rows on all ranks.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    _model_class = TorchModel

    def _training(self, **arguments: Any) -> TorchTraining:
        metrics = metrics_of("torch", self.value_of("metrics") or (), self.value_of("loss"))
        return TorchTraining(**{**arguments, "metrics": metrics})
