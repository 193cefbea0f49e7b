"""Horovod Elastic for Keras 3, with the names of ``horovod.keras.elastic``.

The states and callbacks are Horovod's, with Keras 3's variables. How a state comes back when ranks
are lost is the same for all frameworks: see :mod:`horovod_runner.integrations.horovod_elastic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from horovod._keras import elastic as _impl
from horovod.common.elastic import ObjectState

from horovod_runner.integrations.keras.collectives import collectives

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function ``func(state, ...)`` that goes on from its state's last commit.

    Call it on every rank, after ``hvd.init()``.
    """
    return collectives().hvd.elastic.run(func)  # type: ignore[no-any-return]


class KerasState(ObjectState):  # type: ignore[misc]
    """The state of a training: a model, its optimizer, and values of your own.

    Args:
        model: a built Keras model.
        optimizer: None: the one that the model is compiled with.
        kwargs: values that become attributes, such as ``epoch=0``.

    Raises:
        ValueError: the model is not built, or has no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        hvd = collectives().hvd
        if not model.built:
            raise ValueError(
                f"the model {model.name!r} has no weights yet: call model.build(input_shape), or "
                "begin it with keras.Input, before KerasState(model)"
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError(
                f"the model {model.name!r} has no optimizer: call model.compile before "
                "KerasState(model), or pass optimizer="
            )
        save_model(self)
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Copy the model, the optimizer and the values."""
        save_model(self)
        super().save()

    def restore(self) -> None:
        """Set the model, the optimizer and the values to what was saved last."""
        load_model(self)
        super().restore()

    def sync(self) -> None:
        """Set the model, the optimizer and the values on all ranks to those of rank 0."""
        broadcast_model(self.model, self.optimizer)
        save_model(self)
        super().sync()


class CommitStateCallback(_impl.CommitStateCallbackImpl, keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state every few batches, and at the end of each epoch.

    Args:
        state: the state.
        batches_per_commit: how many batches there are between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(keras.backend, state, batches_per_commit)


class UpdateBatchStateCallback(_impl.UpdateBatchStateCallbackImpl, keras.callbacks.Callback):  # type: ignore[misc]
    """Sets ``state.batch`` to the number of the current batch, and to 0 after each epoch.

    Args:
        state: the state.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(keras.backend, state)


class UpdateEpochStateCallback(_impl.UpdateEpochStateCallbackImpl, keras.callbacks.Callback):  # type: ignore[misc]
    """Sets ``state.epoch`` to the number of epochs that are done, those of earlier attempts too.

    Args:
        state: the state.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(keras.backend, state)


def save_model(state: Any) -> None:
    """Copy the model and optimizer of a state, also of a ``TensorFlowKerasState``."""
    _build(state.model, state.optimizer)
    state._saved_model_state = _values(state.model.weights)
    state._saved_optimizer_state = _values(state.optimizer.variables)


def load_model(state: Any) -> None:
    """Set a state's model and optimizer to what was saved last; the state as above."""
    _build(state.model, state.optimizer)
    _assign(state.model.weights, state._saved_model_state)
    _assign(state.optimizer.variables, state._saved_optimizer_state)


def broadcast_model(model: Any, optimizer: Any, backend: Any = None) -> None:
    """Set the weights and the optimizer's variables on all ranks to those of rank 0.

    Random states stay different on all ranks.
    """
    del backend  # of TensorFlow 1
    _build(model, optimizer)
    collectives().broadcast_variables([*model.weights, *optimizer.variables], 0)


def _build(model: Any, optimizer: Any) -> None:
    """Make an optimizer's variables, which Keras would make in the first step."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)


def _values(variables: Any) -> list[Any]:
    # A copy: on the CPU, torch's arrays share the memory of the tensor.
    return [keras.ops.convert_to_numpy(variable).copy() for variable in variables]


def _assign(variables: Any, values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
