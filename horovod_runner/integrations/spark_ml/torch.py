"""TorchEstimator and TorchModel: PyTorch in Spark ML."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch

from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.torch import TorchKind, caller
from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator
from horovod_runner.integrations.spark_ml.model import TrainedModel
from horovod_runner.integrations.spark_ml.params import EstimatorOptions
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingFunction, TrainingPlan


class TorchModel(TrainedModel):
    """A trained torch module; ``getModel()`` returns it."""

    _files = ("model",)

    def _kind(self) -> TorchKind:
        return TorchKind("module")

    def _write_file(self, name: str, path: Path) -> None:
        self._kind().write(self.getOrDefault(name), path, ())

    def _read_file(self, name: str, path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=False)


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

    framework: Framework = "torch"

    def __init__(self, **params: Unpack[EstimatorOptions]) -> None:
        super().__init__(params)

    def _train(self) -> TrainingFunction:
        return TrainingFunction("horovod_runner.integrations.spark_ml.torch_training")

    def _trained_objects(self) -> dict[str, Any]:
        # Pickled together, so that the optimizer still holds the parameters of this model.
        return {"model": self.getOrDefault("model"), "optimizer": self.getOrDefault("optimizer")}

    def _try(self, first: Mapping[str, Any], plan: TrainingPlan) -> None:
        from horovod_runner.integrations.spark_ml.torch_training import (
            as_list,
            make_optimizer,
            total_loss,
        )

        model = copy.deepcopy(self.getOrDefault("model")).cpu().eval()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch module, not {type(model).__name__}")
        make_optimizer(*copy.deepcopy((model, self.getOrDefault("optimizer"))), plan.learning_rate)
        tensors = [torch.from_numpy(value.copy()) for value in first.values()]
        inputs = dict(zip(plan.features, tensors, strict=False))
        behind = tensors[len(inputs) :]
        weight = behind.pop() if plan.weight is not None else None
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        with torch.no_grad():
            try:
                outputs = as_list(caller(model)(inputs))
            except Exception as error:  # whatever the user's module raises
                raise ValueError(
                    f"model does not fit the columns: {type(error).__name__}: {error}, on a batch "
                    f"of {shapes}. Change feature_cols (or featuresCol) or dtypes, or the model. "
                    "A list inside feature_cols is one input of columns side by side: "
                    "feature_cols=[['age', 'income']]"
                ) from error
            try:
                total_loss(plan, outputs, behind, weight)
            except Exception as error:
                labels = ", ".join(
                    f"{name} {value.dtype} {tuple(value.shape)}"
                    for name, value in zip(plan.labels, behind, strict=True)
                )
                returned = ", ".join(str(tuple(output.shape)) for output in outputs)
                raise ValueError(
                    f"loss does not fit the outputs {returned} and the labels {labels}: "
                    f"{type(error).__name__}: {str(error).rstrip('.')}. Change loss, label_cols "
                    "(or labelCol) or the model; for classes the model needs an output for each"
                ) from error

    def _trained_model(self, trained: Trained) -> TorchModel:
        model = TorchModel()
        module = with_weights(self.getOrDefault("model"), trained)
        model._set(model=module, loss_name=loss_name(self.getOrDefault("loss")))
        return model


def with_weights(module: torch.nn.Module, trained: Trained) -> torch.nn.Module:
    """A copy of a module on the CPU, with the trained weights, in evaluation mode."""
    module = copy.deepcopy(module).cpu()
    module.load_state_dict(torch.load(io.BytesIO(trained.weights), weights_only=True))
    return module.eval()


def loss_name(loss: Any) -> str:
    """The name of a loss: of its function or its class; of the first of several."""
    if isinstance(loss, list | tuple):
        loss = loss[0]
    return str(getattr(loss, "__name__", type(loss).__name__))
