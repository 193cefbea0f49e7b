"""The kinds of models: recognized on the driver, written to a file, loaded where rows are scored.

    torch.nn.Module, LightningModule, TorchScript, torch.export    torch_models
    keras.Model                                                    keras_models
    models logged to MLflow                                        mlflow_models
    Checkpoint with the function that builds the network           checkpoint_models

Any other callable is a function from a dict of arrays to arrays, and its kind is here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import cloudpickle

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.data.feed.options import Framework
from horovod_runner.prepare.pickling import by_value

Parts: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[[Parts], Any]


class ModelKind(Protocol):
    """How one kind of model is kept in a file; pickled to Spark's Python workers.

    Attributes:
        framework: for whom the inputs are made: torch gets images in layout "CHW", and torch and
            TensorFlow get float32 for float64.
    """

    @property
    def framework(self) -> Framework:
        """For whom the inputs are made."""

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Write a model to a new file."""

    def load(self, path: Path, device: str) -> Call:
        """Read the model, and return what computes its outputs for the parts of a batch.

        Args:
            path: of the file.
            device: "cpu", or "cuda:1" for a GPU.
        """


@dataclass(frozen=True)
class FunctionKind:
    """A function from a dict of arrays to an array, a tuple or a dict of arrays."""

    framework: Framework = "numpy"

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Pickle the function, with what it captured."""
        with path.open("xb") as file, by_value(ship_modules):
            cloudpickle.dump(model, file, protocol=5)

    def load(self, path: Path, device: str) -> Call:
        """Unpickle the function."""
        with path.open("rb") as file:
            function: Call = cloudpickle.load(file)
        return function


def recognize(model: Any, build: Callable[[], Any] | None) -> tuple[ModelKind, Any]:
    """The kind of a model, and the model itself.

    Args:
        model: what the user passed to ``predict``.
        build: builds the network for a checkpoint's weights.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no weights of that network.
        TypeError: it is no model.
    """
    if isinstance(model, Checkpoint):
        from horovod_runner.scoring.checkpoint_models import restore

        model = restore(model, build)
    elif build is not None:
        raise TypeError(
            "build makes the network for a checkpoint, and the model is a "
            f"{type(model).__name__}: leave build out"
        )
    torch, keras = sys.modules.get("torch"), sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):  # before torch: it may be both
        from horovod_runner.scoring.keras_models import KerasKind

        return KerasKind.of(model), model
    if torch is not None:
        from horovod_runner.scoring import torch_models

        kind = torch_models.kind_of(model)
        if kind is not None:
            return kind, torch_models.unwrapped(model)
    if isinstance(model, str) or type(model).__module__.startswith("mlflow."):
        from horovod_runner.scoring import mlflow_models

        return mlflow_models.recognize(model)
    if isinstance(model, type) or not callable(model):
        raise TypeError(
            f"predict requires a model, not {model!r}: a torch module, a Keras model, a "
            "Checkpoint with build=..., the URI of a model in MLflow, or a function from a dict of "
            "arrays to an array"
        )
    return FunctionKind(), model
