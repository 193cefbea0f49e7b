"""``horovod.spark.torch``: TorchEstimator and TorchModel."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from horovod_runner.data.scoring.models.torch import TorchKind
from horovod_runner.integrations import spark_ml as ml
from horovod_runner.integrations.horovod_spark.batches import Arrange
from horovod_runner.integrations.horovod_spark.estimator import HorovodEstimator
from horovod_runner.integrations.horovod_spark.kinds import NamesKind
from horovod_runner.integrations.horovod_spark.model import HorovodModel
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.horovod_spark.training import Launched, Training, arrange
from horovod_runner.integrations.spark_ml.params import declare, with_accessors
from horovod_runner.integrations.spark_ml.plan import Metric, TrainingPlan

if TYPE_CHECKING:
    from horovod_runner.data.scoring.models.kind import ModelKind
    from horovod_runner.integrations.spark_ml.model import TrainedModel
    from horovod_runner.integrations.spark_ml.torch_training import Batch

__all__ = ["EstimatorParams", "TorchEstimator", "TorchModel"]


@with_accessors
class TorchEstimator(HorovodEstimator):
    """Trains a torch module on a DataFrame, as ``horovod.spark.torch.TorchEstimator``.

    Inputs and labels are float32. The optimizer's learning rate is multiplied by the number of
    ranks.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
        ValueError: two Params contradict each other.
    """

    prefix = "pytorch"
    library = "horovod.torch"

    input_shapes = declare("input_shapes", "the shape of each input, with -1 for the rows")
    loss_constructors = declare("loss_constructors", "functions that make the losses, on each rank")
    train_minibatch_fn = declare(
        "train_minibatch_fn", "trains with one batch, in place of forward, backward and step"
    )

    def __init__(self, **params: Any) -> None:
        if "loss" in params and "loss_constructors" in params:
            raise ValueError("set loss or loss_constructors, not both")
        if params.get("backward_passes_per_step", 1) <= 0:
            raise ValueError("backward_passes_per_step must be 1 or more")
        super().__init__(**params)

    def _defaults(self) -> dict[str, Any]:
        names = ("input_shapes", "loss_constructors", "train_minibatch_fn")
        return dict.fromkeys(names)

    def _estimator(self, training: Training) -> Any:
        return torch_estimator(training)

    def _create_model(
        self, fitted: TrainedModel, run_id: str, metadata: Mapping[str, Any], training: Training
    ) -> Any:
        module = fitted.getOrDefault("model")
        history = as_history(fitted.history, training.epochs_before)
        optimizer = self._trained_optimizer(module, training)
        kwargs = self._get_model_kwargs(module, history, optimizer, run_id, metadata)
        model = self.get_model_class()(**kwargs)
        model.run = fitted.run
        return model

    def _trained_optimizer(self, module: torch.nn.Module, training: Training) -> Any:
        from horovod_runner.integrations.spark_ml.torch_training import make_optimizer

        optimizer = make_optimizer(module, copy.deepcopy(self.getOrDefault("optimizer")), None)
        if training.optimizer is not None:
            optimizer.load_state_dict(training.optimizer)
        return optimizer

    def get_model_class(self) -> type[Any]:
        """The class of the model that ``fit`` returns."""
        return TorchModel

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
    ) -> dict[str, Any]:
        """The arguments of that class."""
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "feature_columns": self.getFeatureCols(),
            "input_shapes": self.getInputShapes(),
            "label_columns": self.getLabelCols(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
        }


class _Estimator(Launched, ml.TorchEstimator):
    """The estimator of `ml` that trains as Horovod's does."""

    def _plan(self) -> TrainingPlan:
        theirs = self.training.estimator
        function = theirs.getTrainMinibatchFn()
        return replace(
            super()._plan(),
            metrics=metrics_of(theirs.getMetrics(), theirs.getLabelCols()),
            minibatch=None if function is None else Minibatch(function),
            returns_optimizer=True,
        )

    def _trained_model(self, trained: Any) -> Any:
        self.training.optimizer = trained.optimizer
        return super()._trained_model(trained)


def torch_estimator(training: Training) -> _Estimator:
    """The estimator of `ml` for one of Horovod's with a torch module."""
    theirs = training.estimator
    given = theirs._common(training)
    constructors = theirs.getLossConstructors()
    if constructors is not None:
        several = constructors if isinstance(constructors, list | tuple) else [constructors]
        given["loss"] = [make(model=theirs.getModel()) for make in several]
    labels = theirs.getLabelCols()
    # Horovod's default: the mean of the losses.
    given.setdefault("loss_weights", [1 / len(labels)] * len(labels))
    estimator = _Estimator(**given)
    estimator.training = training
    estimator.arrange = arrange(
        theirs,
        estimator.inputs,
        input_shapes=theirs.getInputShapes() or (),
        label_shapes=theirs.getLabelShapes() or (),
        dtypes="float32",
    )
    return estimator


def metrics_of(groups: Sequence[Any], labels: Sequence[str]) -> dict[str, Metric]:
    """Metrics by Horovod's names: each group has a function for all labels, or one for each."""
    metrics = {}
    for number, group in enumerate(groups):
        functions = group if isinstance(group, list | tuple) else [group]
        if len(functions) not in (1, len(labels)):
            raise ValueError(
                f"metrics[{number}] has {len(functions)} functions for {len(labels)} labels: a "
                "group has one function for all labels, or one for each"
            )
        for position, label in enumerate(labels):
            function = functions[position % len(functions)]
            metrics[f"group_{number}_{label}"] = Metric(function, position)
    return metrics


def as_history(history: Mapping[str, Sequence[float]], epochs_before: int) -> list[dict[str, Any]]:
    """The metrics of each epoch in the form of Horovod's estimator for torch."""
    epochs = len(history.get("loss", ()))
    entries = []
    for epoch in range(min(epochs_before, epochs), epochs):
        entry: dict[str, Any] = {"epoch": epoch - epochs_before}
        for phase, start in (("train", ""), ("validation", "val_")):
            if f"{start}loss" in history:
                entry[phase] = {
                    "loss": history[f"{start}loss"][epoch],
                    "all_metrics": _groups(history, start, epoch),
                }
        entries.append(entry)
    return entries


def _groups(
    history: Mapping[str, Sequence[float]], start: str, epoch: int
) -> list[dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for name, values in history.items():
        if name.startswith(f"{start}group_"):
            plain = name.removeprefix(start)
            groups.setdefault(plain.split("_")[1], {})[plain] = values[epoch]
    return [groups[number] for number in sorted(groups, key=int)]


@dataclass(frozen=True)
class Minibatch:
    """Trains with one batch by the user's ``train_minibatch_fn``.

    Attributes:
        function: of (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights),
            and, where it takes them, (backward_passes_per_step, batch_idx); it returns the outputs
            and the loss.
    """

    function: Callable[..., Any]

    def __call__(
        self, plan: TrainingPlan, model: Any, optimizer: Any, batch: Batch, step: int
    ) -> tuple[list[Any], Any]:
        """Train with a batch; returns the model's outputs and the loss."""
        from horovod_runner.integrations.spark_ml.torch_training import as_list, total_loss

        def transform_outputs(outputs: Any, labels: Any) -> tuple[list[Any], Any]:
            return as_list(outputs), labels  # the loss gives labels their shapes

        def loss_fn(outputs: Any, labels: Any, sample_weights: Any) -> Any:
            return total_loss(plan, as_list(outputs), labels, sample_weights) * batch.share

        given = [
            model,
            optimizer,
            transform_outputs,
            loss_fn,
            list(batch.inputs.values()),
            batch.labels,
            batch.weight,
            plan.backward_passes,
            step,
        ]
        takes = len(inspect.signature(self.function).parameters)
        outputs, loss = self.function(*given[: max(7, takes)])
        return as_list(outputs), loss.detach() / max(batch.share, 1e-12)


@with_accessors
class TorchModel(HorovodModel):
    """A trained torch module, as ``horovod.spark.torch.TorchModel``; ``getModel()`` returns it.

    Args:
        params: the Params, by name: see ``explainParams()``.
    """

    _files = ("model",)

    optimizer = declare("optimizer", "the optimizer, with its state after the training")
    input_shapes = declare("input_shapes", "the shape of each input, with -1 for the rows")
    loss = declare("loss", "the loss, or a list with one for each output")
    loss_constructors = declare("loss_constructors", "functions that make the losses")

    def _defaults(self) -> dict[str, Any]:
        return dict.fromkeys(("optimizer", "input_shapes", "loss", "loss_constructors"))

    def _kind(self) -> ModelKind:
        return NamesKind(TorchKind("module"))

    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        shapes = dict(zip(columns, self.getInputShapes() or (), strict=False))
        return Arrange(columns, shapes, dict.fromkeys(columns, "float32"))

    def _write_file(self, name: str, path: Path) -> None:
        self._kind().write(self.getOrDefault(name), path, ())

    def _read_file(self, name: str, path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=False)
