"""Prepares the parts of a loop of Keras 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import horovod_runner.integrations.keras as hvd
from horovod_runner.checkpoints.keras_copy import keras_variables
from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.loops.parts import Role

start = hvd.init


def _model(model: Any, models: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if not model.built:
        raise ValueError(
            f"{type(model).__name__} has no weights yet: call it on a batch before prepare, or "
            "begin it with keras.Input"
        )
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = _distributed(model.optimizer, options)
        model.optimizer.build(model.trainable_variables)
    collectives().broadcast_variables(keras_variables(model), 0)
    return model


def _optimizer(optimizer: Any, models: Sequence[Any], options: Mapping[str, Any]) -> Any:
    optimizer = _distributed(optimizer, options)
    if not optimizer.built:
        optimizer.build([v for model in models for v in model.trainable_variables])
    collectives().broadcast_variables(optimizer.variables, 0)
    return optimizer


def _distributed(optimizer: Any, options: Mapping[str, Any]) -> Any:
    from horovod_runner.integrations.keras.distributed.mixin import Distributed

    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), Distributed):
        return optimizer
    return hvd.DistributedOptimizer(optimizer, **options)


#: What prepares a part, by its role; others stay as they are.
PREPARE: Final[Mapping[Role, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]] = {
    "model": _model,
    "optimizer": _optimizer,
}
