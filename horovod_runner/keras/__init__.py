"""Horovod for Keras 3, on the TensorFlow and the torch backend, with the names of horovod.keras.

Use it like ``horovod.keras``::

    import horovod_runner.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                              hvd.callbacks.MetricAverageCallback()])

Horovod's ``horovod.keras`` and ``horovod.tensorflow.keras`` average no gradients on Keras 3, and
raise no error.

The public name of :mod:`horovod_runner.integrations.keras`. It imports nothing at first: a driver
imports it for code that only the ranks run, and may have no Horovod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod_runner.integrations import keras as _keras

if TYPE_CHECKING:
    from horovod_runner.integrations.keras import *  # noqa: F403

__all__ = _keras.__all__


def __getattr__(name: str) -> Any:
    return getattr(_keras, name)


def __dir__() -> list[str]:
    return dir(_keras)
