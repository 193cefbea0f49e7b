"""Batch normalization with the statistics of all ranks, like horovod.tensorflow's, on Keras 3."""

from __future__ import annotations

import itertools
from typing import Any

import keras
from keras import ops

from horovod_runner.integrations.keras.collectives import collectives

_numbers = itertools.count(1)


@keras.saving.register_keras_serializable("horovod_runner")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalizes with the mean and variance of all ranks' batches, instead of this rank's.

    Call it on every rank, with batches of the same size: each rank counts as much as another.

    Args:
        fused: False or left out; for compatibility.
        kwargs: as for ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused`` or ``synchronized`` is set.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(
                f"SyncBatchNormalization has no fused kernel, but fused={fused}: leave fused out"
            )
        if kwargs.get("synchronized"):
            raise ValueError(
                "synchronized=True is for tf.distribute: leave it out. SyncBatchNormalization "
                "is synchronized over Horovod's ranks"
            )
        super().__init__(**kwargs)
        self._reduction_name = ""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        backend = collectives()
        if backend.hvd.size() == 1:
            return mean, variance
        # Numbered in the order of first use, which is the same on all ranks.
        self._reduction_name = self._reduction_name or f"SyncBatchNormalization.{next(_numbers)}"
        here = ops.stack([mean, variance + ops.square(mean)])
        everywhere = backend.average_with_gradient(here, self._reduction_name)
        mean, mean_of_squares = ops.unstack(everywhere, 2)
        # Rounding may leave a variance a little below 0.
        return mean, ops.maximum(mean_of_squares - ops.square(mean), 0.0)
