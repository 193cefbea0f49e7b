"""Horovod's names beyond DistributedOptimizer on Keras 3. The functions run in the ranks.

All use sums whose gradients are known: with a weight of 0, an input of x and the output as the
loss, the gradient is x, so a step of SGD with a rate of 1 makes the weight -x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy

import horovod_runner.keras as hvd  # imports nothing here


@contextmanager
def translated() -> Iterator[list[str]]:
    """The modules of all functions that TensorFlow's AutoGraph translates."""
    from tensorflow.python.autograph.impl import api

    modules: list[str] = []
    plain = api._convert_actual

    def convert(function: Any, *args: Any) -> Any:
        modules.append(function.__module__)
        return plain(function, *args)

    api._convert_actual = convert
    try:
        yield modules
    finally:
        api._convert_actual = plain


def two_weights(keras: Any) -> Any:
    """A model with the weights a and b, whose output is (a + b) x."""
    given = keras.layers.Input((1,))
    sides = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)(given)
        for name in ("a", "b")
    ]
    return keras.Model(given, keras.layers.Add()(sides))


def weights_after(make: Callable[[Any], Any], steps: int = 1, **compiled: Any) -> list[float]:
    """The weights a and b after steps on the input 1 on rank 0, 2 on rank 1, 4 on rank 2.

    Args:
        make: makes the optimizer of a model.
        steps: the number of steps.
        compiled: arguments of ``model.compile``.
    """
    import keras

    model = two_weights(keras)
    model.compile(make(model), loss=lambda _, output: keras.ops.mean(output), **compiled)
    x = numpy.full((4, 1), 2.0 ** hvd.rank(), "float32")
    for _ in range(steps):
        model.train_on_batch(x, x)
    return [float(weight.sum()) for weight in model.get_weights()]


def _sgd() -> Any:
    import keras

    return keras.optimizers.SGD(1.0)


def local_layers() -> dict[str, Any]:
    """The weights a of a local layer, and b of all ranks."""
    import keras

    partial = hvd.PartialDistributedOptimizer

    def registered(model: Any) -> Any:
        optimizer = hvd.DistributedOptimizer(_sgd())
        optimizer.register_local_var(model.get_layer("a").kernel)
        return optimizer

    def scaled_loss(model: Any) -> Any:
        inner = keras.optimizers.LossScaleOptimizer(_sgd(), initial_scale=8.0)
        return partial(inner, local_layers=model.get_layer("a"))

    return {
        "layer": weights_after(lambda m: partial(_sgd(), local_layers=m.get_layer("a"))),
        "eager": weights_after(
            lambda m: partial(_sgd(), local_layers=[m.get_layer("a")]), run_eagerly=True
        ),
        "not scaled": weights_after(
            lambda m: partial(_sgd(), local_layers=[m.get_layer("a")], scale_local_gradients=False)
        ),
        "registered": weights_after(registered),
        "loss scale": weights_after(scaled_loss),
        "sum": weights_after(
            lambda m: partial(_sgd(), op=hvd.Sum, local_layers=[m.get_layer("a")])
        ),
        "passes": weights_after(
            lambda m: partial(_sgd(), local_layers=[m.get_layer("a")], backward_passes_per_step=2),
            steps=4,
        ),
        "no layers": weights_after(lambda _: partial(_sgd())),
        "all layers": weights_after(lambda m: partial(_sgd(), local_layers=m.layers)),
    }


def local_layer_is_not_broadcast() -> list[float]:
    """Weights and momentums of a local and of another layer, after a broadcast from rank 1."""
    import keras

    model = two_weights(keras)
    model.set_weights([numpy.full((1, 1), 1.0 + hvd.rank(), "float32")] * 2)
    local = model.get_layer("a")
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.0, momentum=0.5), local_layers=local
    )
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    for momentum in optimizer.momentums:
        momentum.assign(numpy.full((1, 1), 10.0 + hvd.rank(), "float32"))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=local.variables)
    callback.set_params({"steps": 1})
    callback.set_model(model)
    callback.on_train_begin()
    values = [*model.trainable_variables, *optimizer.momentums]
    found = [float(keras.ops.convert_to_numpy(value)[0, 0]) for value in values]
    own = model.get_layer("b").kernel
    own.assign(numpy.full((1, 1), 5.0 + hvd.rank(), "float32"))
    callback.on_train_begin()  # a second fit broadcasts nothing
    return [*found, float(keras.ops.convert_to_numpy(own)[0, 0])]


def unbuilt_local_layer() -> None:
    import keras

    hvd.PartialDistributedOptimizer("sgd", local_layers=keras.layers.Dense(1, name="rows"))


def computed_gradients() -> dict[str, Any]:
    """Gradients that compute_gradients has reduced are not reduced a second time."""
    import keras
    import tensorflow as tf

    x = 1.0 + hvd.rank()

    def step_of(optimizer: Any, variable: Any, name: str) -> Callable[..., Any]:
        def step(**options: Any) -> Any:
            pairs = getattr(optimizer, name)(lambda: x * variable, [variable])
            optimizer.apply_gradients(pairs, **options)
            return pairs[0][0]

        return step

    results: dict[str, Any] = {}
    for kind, variable in (
        ("keras", keras.Variable(numpy.zeros(()))),
        ("tensorflow", tf.Variable(0.0)),
    ):
        optimizer = hvd.DistributedOptimizer(_sgd(), op=hvd.Sum)
        gradient = step_of(optimizer, variable, "compute_gradients")()
        results[kind] = [float(gradient), float(variable)]
        tf.function(step_of(optimizer, variable, "_compute_gradients"))(
            experimental_aggregate_gradients=False
        )
        results[f"{kind} in a graph"] = float(variable)
        with tf.GradientTape() as tape:
            loss = x * variable
        pairs = optimizer.compute_gradients(loss, [variable], tape=tape)
        results[f"{kind} of a tape"] = float(pairs[0][0])
        optimizer.apply_gradients(pairs)
        # What compute_gradients has not reduced is reduced.
        optimizer.apply_gradients([(tf.constant(x), variable)])
        results[f"{kind} at last"] = float(variable)
    passes = hvd.DistributedOptimizer(
        _sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    variable = tf.Variable(0.0)
    step = tf.function(step_of(passes, variable, "compute_gradients"))
    results["passes"] = [(step(), float(variable))[1] for _ in range(4)]
    return results


def computed_in_another_graph() -> None:
    import tensorflow as tf

    variable = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(_sgd())

    def compute() -> Any:
        return optimizer.compute_gradients(lambda: 2 * variable, [variable])[0]

    optimizer.apply_gradients([tf.function(compute)()])


def epochs_of_a_gpu_build() -> list[float]:
    """Train where Horovod has NCCL and the rank has no GPU, as with ``gpus_per_rank=0``."""
    from unittest.mock import patch

    import horovod.torch
    import keras

    model = two_weights(keras)
    model.compile(hvd.DistributedOptimizer(_sgd()), loss=lambda _, out: keras.ops.mean(out))
    x = numpy.full((4, 1), 2.0 ** hvd.rank(), "float32")
    average = hvd.callbacks.MetricAverageCallback()
    with patch.object(horovod.torch, "nccl_built", lambda: True):
        model.fit(x, x, epochs=2, verbose=0, callbacks=[average])
    return [float(weight.numpy().item()) for weight in model.weights]


def tapes() -> dict[str, Any]:
    """horovod.tensorflow's tapes and optimizer with a model of Keras 3."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model = two_weights(keras)
    x = tf.fill((4, 1), 1.0 + hvd.rank())
    sources = model.trainable_variables

    def gradients_of(wrap: Callable[..., Any], method: str = "gradient", **options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return getattr(wrap(tape, **options), method)(loss, sources)

    def numbers(gradients: Any) -> list[float]:
        return [float(tf.reduce_sum(gradient)) for gradient in gradients]

    def of_listed(groups: Any) -> Any:
        return gradients_of(hvd.DistributedGradientTape, groups=groups, op=hvd.Sum)

    def of_namesakes() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * namesakes[0] + 2.0 * x * namesakes[1])
        wrapped = hvd.DistributedGradientTape(tape, groups=[namesakes], op=hvd.Sum)
        return wrapped.gradient(loss, namesakes)

    def of_experts() -> Any:
        with tf.GradientTape() as tape:
            loss = experts[hvd.rank()] ** 2 * (1.0 + hvd.rank() / 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, experts)
        return [-1.0 if gradient is None else gradient for gradient in gradients]

    def registered(tape: Any) -> Any:
        wrapped = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
        wrapped.register_local_source(sources[0])
        return wrapped

    layer = model.get_layer("a")
    partial = hvd.PartialDistributedGradientTape
    variable = keras.Variable(numpy.float32(hvd.rank()))
    experts = [tf.Variable(1.0) for _ in range(3)]  # a rank uses one; nobody uses the last one
    namesakes = [tf.Variable(0.0, name="same"), tf.Variable(0.0, name="same")]
    with translated() as modules:
        local, others = gradients_of(partial, "get_local_and_global_gradients", local_layers=layer)
    return {
        "translated": modules,
        "partial": numbers(gradients_of(partial, local_layers=[layer])),
        "registered": numbers(gradients_of(registered)),
        "local": [(v is sources[0], *numbers([g])) for v, g in local],
        "others": [(v is sources[1], *numbers([g])) for v, g in others],
        "listed": numbers(of_listed([sources])),
        "listed in a graph": numbers(tf.function(of_listed, autograph=False)([[sources[1]]])),
        "namesakes": numbers(of_namesakes()),
        "experts": numbers(of_experts()),
        "experts in a graph": numbers(tf.function(of_experts, autograph=False)()),
        "number of groups": numbers(gradients_of(hvd.DistributedGradientTape, groups=1)),
        "optimizer": weights_after(
            lambda model: hvd.DistributedOptimizer(
                _sgd(), op=hvd.Sum, groups=[model.trainable_variables]
            )
        ),
        "compressed": float(hvd.allreduce(variable, compression=hvd.Compression.fp16)),
        "compressed group": numbers(
            hvd.grouped_allreduce([variable] * 2, compression=hvd.Compression.fp16)
        ),
        "synchronized": hvd.SyncBatchNormalization.__mro__[1] is keras.layers.BatchNormalization,
    }


def names_of(backend: str) -> dict[str, Callable[[], Any]]:
    """The functions that a backend supports."""
    wrap = hvd.DistributedOptimizer
    functions: dict[str, Callable[[], Any]] = {
        "local_layers": local_layers,
        "local_layer_is_not_broadcast": local_layer_is_not_broadcast,
        "unbuilt_local_layer": unbuilt_local_layer,
        "local_layer_by_name": lambda: hvd.PartialDistributedOptimizer(
            "sgd", local_layers=["rows"]
        ),
        "unregistered_process_set": lambda: wrap("sgd", process_set=hvd.ProcessSet([0, 1])),
    }
    if backend == "tensorflow":
        return functions | {
            "computed_gradients": computed_gradients,
            "computed_in_another_graph": computed_in_another_graph,
            "tapes": tapes,
        }
    return functions | {
        "computed_on_torch": lambda: wrap(_sgd()).compute_gradients(lambda: 0.0, []),
        "epochs_of_a_gpu_build": epochs_of_a_gpu_build,
    }


def process_sets() -> list[dict[str, Any]]:
    """On three ranks, of which 0 and 2 reduce together: the weights of each rank."""
    import keras

    outer = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[outer])

    def after(make: Callable[..., Any] = hvd.DistributedOptimizer, **options: Any) -> list[float]:
        return weights_after(lambda _: make(_sgd(), process_set=outer, **options))

    def scaled_loss(optimizer: Any, **options: Any) -> Any:
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        return hvd.DistributedOptimizer(scaled, **options)

    results = {
        "average": after(),
        "sum": after(op=hvd.Sum),
        "predivide": after(gradient_predivide_factor=2.0),
        "groups": after(groups=1),
        "bf16": after(compression=hvd.Compression.bf16),
        "fp16": after(compression=hvd.Compression.fp16),
        "loss scale": after(scaled_loss),
        "local": weights_after(
            lambda model: hvd.PartialDistributedOptimizer(
                _sgd(), process_set=outer, local_layers=model.get_layer("a")
            )
        ),
        "global": weights_after(
            lambda _: hvd.DistributedOptimizer(_sgd(), process_set=hvd.global_process_set)
        ),
    }
    if keras.backend.backend() == "tensorflow":
        results["sparse"] = sparse_step(hvd.DistributedOptimizer(_sgd(), process_set=outer))
    fit_with_a_local_layer()
    return list(hvd.allgather_object(results))


def sparse_step(optimizer: Any) -> list[float]:
    """A variable of two rows after a step, to which each rank has a gradient for one row."""
    import tensorflow as tf

    variable = tf.Variable([0.0, 0.0])
    row = [min(hvd.rank(), 1)]
    gradient = tf.IndexedSlices(
        tf.constant([2.0 ** hvd.rank()]), tf.constant(row), tf.constant([2])
    )
    optimizer.apply_gradients([(gradient, variable)])
    return [float(number) for number in variable.numpy()]


def fit_with_a_local_layer() -> None:
    """A fit after which a weight differs between ranks, as it should."""
    import keras

    model = two_weights(keras)
    layer = model.get_layer("a")
    model.compile(hvd.PartialDistributedOptimizer("sgd", local_layers=layer), loss="mse")
    x = numpy.full((4, 1), 1.0 + hvd.rank(), "float32")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layer.variables),
        hvd.callbacks.MetricAverageCallback(),
    ]
    model.fit(x, x, verbose=0, callbacks=callbacks)
