"""Loads the collectives for the backend of Keras; each backend has a separate Horovod."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def collectives() -> Any:
    """Return the module tensorflow_collectives or torch_collectives.

    Raises:
        ImportError: Keras has another backend, or is not Keras 3.
    """
    import keras

    if int(keras.__version__.partition(".")[0]) < 3:
        raise ImportError(
            f"horovod_runner.keras requires Keras 3, and this is Keras {keras.__version__}: import "
            "Horovod's horovod.keras instead, which works with this version"
        )
    name = keras.backend.backend()
    if name in ("tensorflow", "torch"):
        return import_module(f"horovod_runner.integrations.keras.{name}_collectives")
    raise ImportError(
        f"Horovod does not support Keras's backend {name!r}: set KERAS_BACKEND to 'tensorflow' or "
        "'torch' before Keras is imported (HorovodRunner(..., env={'KERAS_BACKEND': 'torch'}))"
    )
