"""Keras on its TensorFlow and torch backends: where it trains, and that the ranks stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal

_FEATURES = 8


class KerasFit(NamedTuple):
    """The results of a rank: Keras's backend, the device of the weights, losses, all weights."""

    backend: str
    device: str
    losses: list[float]
    weights: list[float]


@check("howto/keras.md", 150, Needs(frameworks=("tensorflow",), packages=("keras",)))
def keras_tensorflow(case: VerifyCase) -> Iterator[VerifyReading]:
    """Keras trains on the ranks' GPUs with its TensorFlow backend."""
    yield from _fit(case, "tensorflow")


@check("howto/keras.md", 150, Needs(packages=("keras",)))
def keras_torch(case: VerifyCase) -> Iterator[VerifyReading]:
    """Keras trains on the ranks' GPUs with its torch backend."""
    yield from _fit(case, "torch")


def _fit(case: VerifyCase, backend: str) -> list[VerifyReading]:
    variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    runner = case.runner(case.ranks(backend), backend, env=variables)
    epochs, rows = (3, 256) if case.quick else (5, 4096)
    results = runner.run_all(fit, epochs=epochs, rows=rows)
    return read_fits(results, backend, "GPU" if case.on_gpus(backend) else "CPU")


def fit(epochs: int, rows: int) -> KerasFit:
    """Fit a small model to a sum; the ranks' ``main``."""
    import keras
    import numpy as np

    import horovod_runner.integrations.keras as hvd

    hvd.init()
    first = keras.initializers.GlorotUniform(hvd.rank())  # the broadcast makes them equal
    x = np.random.default_rng(hvd.rank()).normal(size=(rows, _FEATURES)).astype("float32")
    hidden = keras.layers.Dense(32, "relu", kernel_initializer=first)
    model = keras.Sequential([keras.Input((_FEATURES,)), hidden, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    history = model.fit(
        x,
        x.sum(1, keepdims=True),
        batch_size=32,
        epochs=epochs,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
    )
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    losses = [float(loss) for loss in history.history["loss"]]
    return KerasFit(keras.backend.backend(), device_type(model), losses, weights.tolist())


def device_type(model: Any) -> str:
    """The kind of device that a Keras model's weights are on, "GPU" or "CPU".

    torch says "cuda:0", TensorFlow "/job:localhost/replica:0/task:0/device:GPU:0".
    """
    device = str(model.weights[0].value.device).upper()
    return "GPU" if "GPU" in device or "CUDA" in device else "CPU"


def read_fits(results: Sequence[KerasFit], backend: str, device: str) -> list[VerifyReading]:
    """Compare the ranks' results with the expected backend and device."""
    losses = results[0].losses
    first = results[0].weights
    spread = max(
        abs(mine - own) for each in results for mine, own in zip(each.weights, first, strict=True)
    )
    return [
        equal("backend", {each.backend for each in results}, {backend}),
        equal("device of the weights", {each.device for each in results}, {device}),
        VerifyReading(
            f"loss of {len(results)} ranks in the first and last epoch",
            f"{losses[0]:.4f}, {losses[-1]:.4f}",
            "the last is below half of the first",
            losses[-1] < losses[0] / 2,
        ),
        equal("difference between the ranks' weights", f"{spread:g}", "0"),
    ]
