"""``horovod.spark.torch``: TorchEstimator and TorchModel."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.data.scoring.models.torch import TorchKind, read_module
from horovod_runner.integrations.horovod_spark.batches import Arrange, in_order
from horovod_runner.integrations.horovod_spark.estimator import HorovodEstimator
from horovod_runner.integrations.horovod_spark.kinds import NamesKind
from horovod_runner.integrations.horovod_spark.model import HorovodModel
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.spark_ml.params import with_params
from horovod_runner.integrations.training.torch import TorchTraining
from horovod_runner.integrations.training.training import Metric, Trained, Training

if TYPE_CHECKING:
    from horovod_runner.data.scoring.models.kind import ModelKind
    from horovod_runner.integrations.training.torch_loop import Batch

__all__ = ["EstimatorParams", "TorchEstimator", "TorchModel"]


_ESTIMATOR: Final = {
    "input_shapes": "the shape of each input, with -1 for the rows",
    "loss_constructors": "functions that make the losses, on each rank",
    "train_minibatch_fn": "trains with one batch, in place of forward, backward and step",
}
_MODEL: Final = {
    "optimizer": "the optimizer, with its state after the training",
    "input_shapes": "the shape of each input, with -1 for the rows",
    "loss": "the loss, or a list with one for each output",
    "loss_constructors": "functions that make the losses",
}


@with_params(_ESTIMATOR)
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
    _own_defaults = dict.fromkeys(_ESTIMATOR)

    def __init__(self, **params: Any) -> None:
        if "loss" in params and "loss_constructors" in params:
            raise ValueError("set loss or loss_constructors, not both")
        if params.get("backward_passes_per_step", 1) <= 0:
            raise ValueError("backward_passes_per_step must be 1 or more")
        super().__init__(**params)

    def _needs(self) -> Sequence[str]:
        return ("optimizer",) if self.getLossConstructors() is not None else ("optimizer", "loss")

    def _training(self, logs: str | None, **arguments: Any) -> Training:
        constructors = self.getLossConstructors()
        if constructors is not None:
            several = constructors if isinstance(constructors, list | tuple) else [constructors]
            arguments["loss"] = [make(model=self.getModel()) for make in several]
        labels, function = self.getLabelCols(), self.getTrainMinibatchFn()
        # Horovod's default: the mean of the losses.
        arguments.setdefault("loss_weights", [1 / len(labels)] * len(labels))
        # In order, whatever the names of the model's parameters are.
        training = TorchTraining(
            **{**arguments, "metrics": metrics_of(self.getMetrics(), labels)},
            features=in_order(self.getFeatureCols()),
            minibatch=None if function is None else Minibatch(function),
            returns_optimizer=True,
        )
        arrange = Arrange.of_training(
            training,
            input_shapes=self.getInputShapes() or (),
            label_shapes=self.getLabelShapes() or (),
            dtypes="float32",
            row=self.getTransformationFn(),
        )
        return replace(training, options={"transform": arrange})

    def _create_model(
        self, network: Any, trained: Trained, epochs_before: int, run_id: str, metadata: Any
    ) -> Any:
        from horovod_runner.integrations.training.optimizer import make_optimizer

        # The copy of an optimizer of the model's parameters holds those of the trained network.
        parameters = zip(self.getModel().parameters(), network.parameters(), strict=True)
        memo: dict[int, Any] = {id(theirs): ours for theirs, ours in parameters}
        copied = copy.deepcopy(self.getOrDefault("optimizer"), memo)
        optimizer = make_optimizer(network, copied, None)
        optimizer.load_state_dict(trained.optimizer)
        history = as_history(trained.history, epochs_before)
        kwargs = self._get_model_kwargs(network, history, optimizer, run_id, metadata)
        return self.get_model_class()(**kwargs)

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
        self, training: TorchTraining, model: Any, optimizer: Any, batch: Batch, step: int
    ) -> tuple[list[Any], Any]:
        """Train with a batch; returns the model's outputs and the loss."""
        from horovod_runner.integrations.training.losses import as_list, total_loss

        def transform_outputs(outputs: Any, labels: Any) -> tuple[list[Any], Any]:
            return as_list(outputs), labels  # the loss gives labels their shapes

        def loss_fn(outputs: Any, labels: Any, sample_weights: Any) -> Any:
            return total_loss(training, as_list(outputs), labels, sample_weights) * batch.share

        inputs = list(batch.inputs.values())
        given = [model, optimizer, transform_outputs, loss_fn, inputs, batch.labels, batch.weight]
        given += [training.backward_passes_per_step, step]
        takes = len(inspect.signature(self.function).parameters)
        outputs, loss = self.function(*given[: max(7, takes)])
        return as_list(outputs), loss.detach() / max(batch.share, 1e-12)


@with_params(_MODEL)
class TorchModel(HorovodModel):
    """A trained torch module, as ``horovod.spark.torch.TorchModel``; ``getModel()`` returns it.

    Args:
        params: the Params, by name: see ``explainParams()``.
    """

    _read_model = staticmethod(read_module)
    _own_defaults = dict.fromkeys(_MODEL)

    def _kind(self) -> ModelKind:
        return NamesKind(TorchKind("module"))

    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        shapes = dict(zip(columns, self.getInputShapes() or (), strict=False))
        return Arrange(columns, shapes, dict.fromkeys(columns, "float32"))
