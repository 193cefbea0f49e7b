"""The collectives of the backend that Keras has, and no other: each is a Horovod of its own."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def collectives() -> Any:
    """The module tensorflow_collectives, or torch_collectives.

    Raises:
        ImportError: Keras has another backend, or is not Keras 3.
    """
    import keras

    if int(keras.__version__.partition(".")[0]) < 3:
        raise ImportError(
            f"horovod_runner.keras is for Keras 3, and this is Keras {keras.__version__}, on which "
            "Horovod's own horovod.keras works: import that"
        )
    name = keras.backend.backend()
    if name == "tensorflow":
        from horovod_runner.keras import tensorflow_collectives

        return tensorflow_collectives
    if name == "torch":
        from horovod_runner.keras import torch_collectives

        return torch_collectives
    raise ImportError(
        f"Horovod has no collectives for Keras's backend {name!r}: set KERAS_BACKEND to "
        "'tensorflow' or 'torch' before Keras is imported (HorovodRunner(..., "
        "env={'KERAS_BACKEND': 'torch'}))"
    )
