"""Recognizes what a user passes as a model, on the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.data.scoring.models.kind import FunctionKind, Recognized


def recognize(model: Any, build: Callable[[], Any] | None) -> Recognized:
    """The kind of what the user passed to ``predict``, and the model itself.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no weights of that network.
        TypeError: it is no model.
    """
    if isinstance(model, Recognized):
        return model
    if isinstance(model, Checkpoint):
        from horovod_runner.data.scoring.models.checkpoint import restore

        model = restore(model, build)
    elif build is not None:
        raise TypeError(
            "build makes the network for a checkpoint, and the model is a "
            f"{type(model).__name__}: leave build out"
        )
    if isinstance(model, str) or type(model).__module__.startswith("mlflow."):
        from horovod_runner.data.scoring.models.mlflow import PyfuncKind, load_logged

        model = load_logged(model)
        if isinstance(model, Path):
            return Recognized(PyfuncKind(), model)
    torch, keras = sys.modules.get("torch"), sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):  # before torch: it may be both
        from horovod_runner.data.scoring.models.keras import KerasKind

        return Recognized(KerasKind.of(), model)
    if torch is not None:
        from horovod_runner.data.scoring.models.torch import kind_of, unwrapped

        kind = kind_of(model)
        if kind is not None:
            return Recognized(kind, unwrapped(model))
    if isinstance(model, type) or not callable(model):
        raise TypeError(
            f"predict requires a model, not {model!r}: a torch module, a Keras model, a "
            "Checkpoint with build=..., the URI of a model in MLflow, or a function from a dict of "
            "arrays to an array"
        )
    return Recognized(FunctionKind(), model)
