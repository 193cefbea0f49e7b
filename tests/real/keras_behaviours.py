"""Further behaviours of Keras 3 with Horovod. The functions run in the ranks and return results."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy

import horovod_runner.keras as hvd  # imports nothing here
from horovod_runner.integrations.training.keras import set_seed

ROWS, BATCH = 32, 8


def _collective_callbacks() -> list[Any]:
    return [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]


def _fit(optimizer: Any = None, rows: int = ROWS, callbacks: Any = None, **options: Any) -> Any:
    import keras

    set_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    x = numpy.random.default_rng(3 + hvd.rank()).normal(size=(rows, 4)).astype("float32")
    optimizer = hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.05))
    # What callbacks do depends on no graph, and TensorFlow would build one for each, for seconds.
    model.compile(optimizer, loss="mse", run_eagerly=True)
    callbacks = _collective_callbacks() if callbacks is None else callbacks
    options = {"x": x, "y": x.sum(1, keepdims=True), "batch_size": BATCH, "epochs": 2, **options}
    if "batches" in options:
        batches = options.pop("batches")
        options = {"x": batches(options["x"], options["y"]), "epochs": 1}
    history = model.fit(**options, callbacks=callbacks, shuffle=False, verbose=0)
    return model, history


def different_numbers_of_batches() -> None:
    _fit(rows=ROWS + BATCH * hvd.rank())


def _generated(x: Any, y: Any) -> Iterator[Any]:
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def different_numbers_unknown_to_keras() -> None:
    _fit(rows=ROWS + BATCH * hvd.rank(), batches=_generated)


def different_numbers_with_the_average_first() -> None:
    callbacks = _collective_callbacks()[::-1]
    _fit(rows=ROWS + BATCH * (1 - hvd.rank()), batches=_generated, callbacks=callbacks)


def different_numbers_of_a_pipeline() -> None:
    """Unequal numbers in a tf.data pipeline: TensorFlow notices the end inside a step."""
    import tensorflow as tf

    def batches(x: Any, y: Any) -> Any:
        spec = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))
        return tf.data.Dataset.from_generator(lambda: _generated(x, y), output_signature=spec)

    _fit(rows=ROWS + BATCH * hvd.rank(), batches=batches)


def _adding(metrics: Callable[[int], dict[str, float]]) -> Any:
    """A callback that adds this rank's metrics of each epoch."""
    import keras

    def add(epoch: int, logs: Any) -> None:
        logs.update(metrics(epoch))

    return keras.callbacks.LambdaCallback(on_epoch_end=add)


def one_rank_stops_early() -> None:
    import keras

    class StopOnRank0(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = hvd.rank() == 0

    _fit(epochs=4, callbacks=[*_collective_callbacks(), StopOnRank0()])


def metrics_of_one_rank() -> None:
    adding = _adding(lambda _: {"extra": 1.0} if hvd.rank() == 1 else {})
    _fit(callbacks=[adding, *_collective_callbacks()])


def different_metrics_on_each_rank() -> None:
    adding = _adding(lambda _: {"first" if hvd.rank() == 0 else "second": 1.0})
    _fit(callbacks=[adding, *_collective_callbacks()])


def saved_and_loaded() -> dict[str, Any]:
    """The optimizer in a saved file, and after load_model."""
    import keras

    model, _ = _fit(keras.optimizers.Adam(0.01))
    plain = keras.models.clone_model(model)
    plain.compile(keras.optimizers.Adam(0.01), loss="mse")
    with tempfile.TemporaryDirectory() as folder:
        written = []
        for saved in (model, plain):
            path = Path(folder) / "model.keras"
            saved.save(path)
            with zipfile.ZipFile(path) as file:
                config = json.loads(file.read("config.json"))["compile_config"]["optimizer"]
            written.append({**config, "config": {**config["config"], "name": ""}})
        model.save(path)
        loaded = hvd.load_model(path)
        loaded_plain = keras.models.load_model(path)
    before, after = (
        [keras.ops.convert_to_numpy(variable) for variable in m.optimizer.variables]
        for m in (model, loaded)
    )
    second_call = "not refused"
    try:
        hvd.DistributedOptimizer(loaded.optimizer)
    except ValueError as error:
        second_call = str(error)
    return {
        "config in the file": written[0],
        "config of a plain optimizer": written[1],
        "state is restored": all((a == b).all() for a, b in zip(before, after, strict=True)),
        "second call": second_call,
        "loads without Horovod": type(loaded_plain.optimizer).__mro__[1]
        is not type(loaded.optimizer),
        "variables can be called": len(loaded.optimizer.variables()) == len(before),
    }


def warm_up() -> dict[str, Any]:
    """The learning rate of every batch, and the momentum before and after it changes."""
    import keras

    rates: list[float] = []
    momentums: list[float] = []

    class Record(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
            momentums.append(self._momentum())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            momentums.append(self._momentum())

        def _momentum(self) -> float:
            momentum = keras.ops.convert_to_numpy(self.model.optimizer.momentums[0])
            return float(numpy.abs(momentum).sum())

    warm = hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2)
    _, history = _fit(
        keras.optimizers.SGD(0.08, momentum=0.9),
        epochs=3,
        callbacks=[*_collective_callbacks(), warm, Record()],
    )
    # Between two batches the momentum changes by the same factor as the learning rate.
    return {"rates": rates, "lr": history.history["lr"], "momentums": momentums[1:-1]}


def schedule() -> dict[str, Any]:
    import keras

    steps = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=1, end_epoch=3)
    _, history = _fit(keras.optimizers.SGD(0.4), epochs=4, callbacks=[steps])
    scheduled = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    try:
        _fit(keras.optimizers.SGD(scheduled), callbacks=[steps])
    except ValueError as error:
        return {"lr": history.history["lr"], "error": str(error)}
    return {}


def averaged() -> dict[str, Any]:
    adding = _adding(lambda epoch: {"extra": 10.0 * hvd.rank() + epoch})
    _, history = _fit(callbacks=[adding, *_collective_callbacks()])
    return dict(history.history)


def best_models() -> list[str]:
    """The models that are saved in a fit, and in one that goes on after it as in a restart."""
    values = (numpy.nan, 0.5, None, 0.4, 0.7, 0.6, 0.8)  # an epoch without validation has none
    accuracy = _adding(lambda epoch: {"accuracy": values[epoch]} if values[epoch] else {})
    with tempfile.TemporaryDirectory() as folder:
        for start, end in ((0, 5), (5, 7)):
            best = hvd.callbacks.BestModelCheckpoint(
                "accuracy", filepath=f"{folder}/{{epoch}}-{{accuracy:.1f}}.keras"
            )
            callbacks = [*_collective_callbacks(), accuracy, best]
            _fit(initial_epoch=start, epochs=end, callbacks=callbacks)
        return sorted(path.name for path in Path(folder).glob("*.keras"))


def decided_together() -> list[Any]:
    """The epochs and the learning rate of a fit in which the ranks have different metrics."""
    import keras

    def metrics(epoch: int) -> dict[str, float]:
        metric = ([3.0, 2.0, 1.0, 0.0], [0.0, 0.5, 2.5, 4.5])[hvd.rank()][epoch]
        return {"metric": metric, **({"alone": 1.0} if hvd.rank() == 0 else {})}

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        _adding(metrics),
        hvd.callbacks.ReduceLROnPlateau("metric", factor=0.5, patience=1, mode="min"),
        hvd.callbacks.EarlyStopping("metric", patience=2, mode="min"),
        hvd.callbacks.EarlyStopping("alone", patience=0, mode="min"),
    ]
    model, history = _fit(keras.optimizers.SGD(0.4), epochs=4, callbacks=callbacks)
    return [history.epoch, float(model.optimizer.learning_rate)]


def values() -> list[Any]:
    import keras

    rank = hvd.rank()
    tensors = [
        hvd.allreduce([1.0 + rank, 2.0]),
        hvd.allreduce([1.0 + rank, 2.0], average=numpy.False_),
        hvd.allreduce([1.0 + rank, 2.0], average=True),
        hvd.allreduce(numpy.float32(rank), op=hvd.Max, name="largest"),
        hvd.allgather([[rank]] * (rank + 1)),
        hvd.broadcast([3.0 * rank], 1),
        hvd.reducescatter([[1.0 + rank], [3.0], [5.0]], op=hvd.Sum),
    ]
    lists = [keras.ops.convert_to_numpy(tensor).tolist() for tensor in tensors]
    return [*lists, hvd.broadcast_object({"rank": rank}, 1), hvd.size(), hvd.local_rank() == rank]


def three_numbers_as_bfloat16() -> Any:
    """A variable after a step; its three numbers are no multiple of the ranks."""
    import keras

    variable = keras.Variable(numpy.zeros(3, "float32"))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=hvd.Compression.bf16
    )
    optimizer.build([variable])
    gradient = keras.ops.convert_to_tensor([1.0, 2.0, 4.0]) * (1 + hvd.rank())
    optimizer.apply([gradient])
    return keras.ops.convert_to_numpy(variable).tolist()


def dropout_differs() -> list[Any]:
    """The states of random generators differ between ranks; weights are equal."""
    import keras

    set_seed(hvd.rank())
    layers = keras.layers
    model = keras.Sequential([layers.Input((4,)), layers.Dropout(0.5), layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer("sgd"), loss="mse")
    x = numpy.ones((BATCH, 4), "float32")
    model.fit(x, x[:, :1], verbose=0, callbacks=_collective_callbacks())
    hvd.broadcast_variables(model.variables, 0)
    seed = model.layers[0].seed_generator.state
    state = [int(number) for number in keras.ops.convert_to_numpy(seed)]
    weights = model.get_weights()[0].tolist()
    return [list(pair) for pair in zip(*hvd.allgather_object([state, weights]), strict=True)]


class _Momentum:
    """Stands for an optimizer of torch, without its import, which takes seconds."""

    __module__ = "torch.optim"
    __qualname__ = "Momentum"


def passes_of_a_built_optimizer() -> None:
    import keras

    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable(numpy.zeros(3))])
    hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)


def an_unknown_keras() -> None:
    """A Keras that no longer calls _clip_gradients causes an error."""
    import keras

    class NewKerasOptimizer(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    _fit(NewKerasOptimizer(0.1))


def _state_of(*inputs: tuple[int, ...]) -> None:
    """Make a state of a model without an optimizer, which has weights if its input is known."""
    import keras

    layers = [*map(keras.Input, inputs), keras.layers.Dense(1)]
    hvd.elastic.KerasState(keras.Sequential(layers))


def _is_behaviour(each: Any) -> bool:
    return getattr(each, "__module__", "") == __name__ and not each.__name__.startswith("_")


BEHAVIOURS: dict[str, Callable[[], Any]] = {
    **{name: each for name, each in globals().items() if _is_behaviour(each)},
    "unknown_to_keras": lambda: hvd.DistributedOptimizer(_Momentum()),
    "global_variables": lambda: hvd.broadcast_global_variables(0),
    "state_of_an_unbuilt_model": _state_of,
    "state_without_an_optimizer": lambda: _state_of((2,)),
}


def behave(functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the result of every function, or its exception as text."""
    results: dict[str, Any] = {}
    for name, function in functions.items():
        try:
            results[name] = function()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results
