"""Time of a training step with the DistributedOptimizer for Keras 3.

One rank is compared with the plain optimizer, two ranks with the loop of Horovod's documentation
for TensorFlow 2: the same model, batches and optimizer, in alternating turns in one process.

    python benchmarks/keras_steps.py [--turns 16] [--backends tensorflow torch] [--json PATH]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import report

from horovod_runner import HorovodRunner

_BATCH, _STEPS = 64, 150
_MODELS = ("dense", "convolutions")
_TARGET_ONE, _TARGET_TWO = 1.03, 1.0


def train(model_name: str, turns: int, backend: str) -> dict[str, list[float]]:
    """Train in each way by turns; the ranks' ``main``. Returns seconds a step by way."""
    import time

    import keras
    import numpy

    import horovod_runner.keras as hvd

    hvd.init()
    random = numpy.random.default_rng(hvd.rank())
    shape = (256,) if model_name == "dense" else (16, 16, 3)
    x = random.normal(size=(_BATCH * _STEPS, *shape)).astype("float32")
    y = random.integers(0, 10, size=len(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": _BATCH}
    if backend == "tensorflow":  # as in the loops
        import tensorflow as tf

        data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH)}

    def make() -> Any:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        if model_name == "dense":
            inside = [layers.Dense(512, "relu"), layers.Dense(256, "relu")]
        else:
            inside = [
                layers.Conv2D(16, 3, activation="relu"),
                layers.Conv2D(32, 3),
                layers.Flatten(),
            ]
        return keras.Sequential([layers.Input(shape), *inside, layers.Dense(10)])

    def fit_with(optimizer: Any, callbacks: list[Any]) -> Any:
        model = make()
        model.compile(optimizer, loss)
        return lambda: model.fit(**data, verbose=0, callbacks=callbacks)

    ways = {}
    if hvd.size() == 1:
        ways["plain"] = fit_with(keras.optimizers.Adam(), [])
        ways["plain again"] = fit_with(keras.optimizers.Adam(), [])
        ways["ours"] = fit_with(hvd.DistributedOptimizer(keras.optimizers.Adam()), [])
    else:
        averaged = hvd.DistributedOptimizer(keras.optimizers.Adam())
        ways["ours, fit"] = fit_with(
            averaged,
            [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
            ],
        )
        if backend == "tensorflow":
            batches = data["x"]
            ways["tape"] = _loop(make(), loss, batches, tape=True)
            ways["tape again"] = _loop(make(), loss, batches, tape=True)
            ways["ours, loop"] = _loop(make(), loss, batches, tape=False)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        order = list(ways) if turn % 2 else list(ways)[::-1]
        for name in order:
            hvd.allreduce([0.0], name="together")
            start = time.perf_counter()
            ways[name]()
            seconds = (time.perf_counter() - start) / _STEPS
            if turn:  # not timed: it makes the graphs
                found[name].append(seconds)
    return found


def _loop(model: Any, loss_of: Any, batches: Any, *, tape: bool) -> Any:
    """Horovod's loop for TensorFlow 2 with its tape, or the same loop with our optimizer."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    import horovod_runner.keras as own

    optimizer = keras.optimizers.Adam()
    if not tape:
        optimizer = own.DistributedOptimizer(optimizer)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as recorded:
            loss = loss_of(labels, model(images, training=True))
        if tape:
            recorded = hvd.DistributedGradientTape(recorded)
        gradients = recorded.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def epoch() -> None:
        for images, labels in batches:
            step(images, labels)

    return epoch


def measure(np: int, model: str, backend: str, turns: int) -> dict[str, list[float]]:
    """Rank 0's seconds a step."""
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    runner = HorovodRunner(np=np, progress=False, env=env)
    found: dict[str, list[float]] = runner.run(
        train, model_name=model, turns=turns, backend=backend
    )
    return found


def _ratio(seconds: dict[str, list[float]], own: str, peers: tuple[str, ...]) -> float:
    """The ratio of the medians; the peer's is over both of its turns."""
    return median(seconds[own]) / median([each for name in peers for each in seconds[name]])


def rows_of(raw: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """The table's rows, one for each comparison."""
    rows = []
    for title, seconds in raw.items():
        peer = "plain" if "plain" in seconds else "tape"
        if peer not in seconds:
            continue
        peers = peer, f"{peer} again"
        noise = median(seconds[peers[1]]) / median(seconds[peer])
        target = _TARGET_ONE if peer == "plain" else _TARGET_TWO
        for own in (name for name in seconds if name.startswith("ours")):
            what = f"{title}: {own} / {peer}"
            cells = report.at_most(what, _ratio(seconds, own, peers), target)
            rows.append([what, f"{median(seconds[peer]) * 1e3:.2f}", *cells, f"{noise:.2f}"])
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="What a DistributedOptimizer costs a step.")
    parser.add_argument("--turns", type=int, default=16, help=f"of {_STEPS} steps each")
    backends = ("tensorflow", "torch")
    parser.add_argument("--backends", nargs="+", choices=backends, default=backends)
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=_MODELS)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    raw = {
        f"{backend}, {model}, np={np}": measure(np, model, backend, options.turns)
        for backend in options.backends
        for model in options.models
        for np in (-1, -2)
        if not (backend == "torch" and np == -2)
    }
    heads = ["a step", "peer's, ms", "ratio", "target", "", "noise"]
    print(f"\n{report.machine()}; {options.turns} turns\n")
    print(report.table(heads, rows_of(raw)))
    if options.json:
        report.write_json(options.json, raw)


if __name__ == "__main__":
    main()
