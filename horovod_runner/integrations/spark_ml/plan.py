"""What an estimator sends to its ranks beside the model and the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class TrainingFunction:
    """A module's function ``train``; calls it on the ranks.

    The module is imported when it is called: after the user's model, which decides between
    packages (``lightning`` or ``pytorch_lightning``).

    Attributes:
        module: the module's name.
    """

    module: str

    def __call__(self, **arguments: Any) -> Trained | None:
        """Train on this rank."""
        trained: Trained | None = import_module(self.module).train(**arguments)
        return trained


@dataclass(frozen=True)
class Metric:
    """A metric of a torch model.

    Attributes:
        function: of (output, label), tensors of shape (rows, ...).
        label: the number of the output and of the label that it takes.
    """

    function: Callable[..., Any]
    label: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How the ranks train; the Params of the estimator have the same names.

    Attributes:
        features: the model's inputs, by name: a column, or columns side by side.
        labels: the label columns.
        weight: the column of the rows' weights; None without one.
        options: of the feeds: images, dtypes, pad_ragged, transform.
        steps: of an epoch; None for all rows.
        val_steps: of a validation; None for all rows.
        saves: whether each epoch ends with a checkpoint.
        scales_learning_rate: whether the learning rate is multiplied by the number of ranks.
        minibatch: trains with a batch in place of our own step; see ml/torch_training.py.
        returns_optimizer: whether the state of a torch optimizer comes back with the weights.
    """

    features: Mapping[str, str | list[str]]
    labels: Sequence[str]
    weight: str | None
    options: Mapping[str, Any]
    loss: Any
    loss_weights: Sequence[float] | None
    metrics: Mapping[str, Metric]
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    shuffle: bool
    seed: int
    callbacks: Sequence[Any]
    compression: Any
    backward_passes: int
    learning_rate: float | None
    verbose: int
    saves: bool
    scales_learning_rate: bool = False
    minibatch: Callable[..., Any] | None = None
    returns_optimizer: bool = False

    @property
    def columns(self) -> dict[str, str | list[str]]:
        """The parts of a batch: the features, the labels, and the weight where there is one."""
        parts = {**self.features, **{f"label {name}": name for name in self.labels}}
        return parts if self.weight is None else {**parts, "weight of the row": self.weight}

    def compression_of(self, horovod: Any) -> Any:
        """The class that compresses gradients, of a module of Horovod's names."""
        if self.compression is None or isinstance(self.compression, str):
            return getattr(horovod.Compression, self.compression or "none")
        return self.compression

    def feed(self, *, shuffle: bool, batch_size: int) -> dict[str, Any]:
        """Arguments of ``Shard.to_torch`` and ``Shard.to_tf``."""
        return {
            "batch_size": batch_size,
            "columns": self.columns,
            "shuffle": shuffle,
            "seed": self.seed,
            **self.options,
        }


@dataclass(frozen=True)
class Trained:
    """What rank 0 returns.

    Attributes:
        weights: the state of the trained model.
        history: the metrics of each epoch, by name.
        optimizer: the state of the optimizer, if the plan asks for it; the learning rate is not
            scaled.
    """

    weights: Any
    history: Mapping[str, Sequence[float]]
    optimizer: Any = None
