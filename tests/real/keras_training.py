"""Keras trainings on two ranks that must equal one process on the global batches.

They run in the ranks; test_keras compares the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy

import horovod_runner.keras as hvd  # imports nothing here
from horovod_runner.integrations.training.keras import set_seed

LOCAL, STEPS, EPOCHS = 8, 4, 3


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: makes the model.
        optimizer: makes Keras's optimizer.
        distributed: arguments of DistributedOptimizer.
        compile: arguments of model.compile on the ranks; they change no result.
        plain: makes the optimizer of the single process; None uses ``optimizer``.
        plain_model: makes the model of the single process; None uses ``model``.
        backends: the backends that support the training.
        data: makes inputs and targets for a number of rows; None uses ``numbers``.
        tolerance: the maximum difference of the losses.
    """

    model: Callable[[Any], Any]
    optimizer: Callable[[Any], Any]
    distributed: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    plain: Callable[[Any], Any] | None = None
    plain_model: Callable[[Any], Any] | None = None
    backends: tuple[str, ...] = ("tensorflow", "torch")
    data: Callable[[int], tuple[Any, Any]] | None = None
    tolerance: float = 1e-5


def numbers(rows: int) -> tuple[Any, Any]:
    random = numpy.random.default_rng(5)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, (x @ random.normal(size=(6, 2))).astype("float32")


def words(rows: int) -> tuple[Any, Any]:
    random = numpy.random.default_rng(6)
    x = random.integers(0, 30, size=(rows, 5))
    return x, random.normal(size=(rows, 2)).astype("float32")


def overflowing(rows: int) -> tuple[Any, Any]:
    """Data with one row of rank 1 whose scaled gradient is infinite in float16."""
    x, y = numbers(rows)
    factor = numpy.zeros((rows, 1), "float32")
    factor[2 * LOCAL + LOCAL + 3] = 1e7
    return numpy.hstack([x, factor]), y / 10


def dense(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(2)])


def unbuilt(keras: Any) -> Any:
    return keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])


def frozen(keras: Any) -> Any:
    model = dense(keras)
    model.layers[0].trainable = False
    return model


def embedding(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((5,)), layers.Embedding(30, 4), layers.Flatten(), layers.Dense(2)]
    )


def normalized(keras: Any, normalization: Any = None) -> Any:
    layers = keras.layers
    layer = (normalization or layers.BatchNormalization)()
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layer, layers.Dense(2)])


def synchronized(keras: Any) -> Any:
    return normalized(keras, hvd.SyncBatchNormalization)


def half(keras: Any) -> Any:
    """A float16 model: 1 + the last column multiplies a row's gradient, but not its output."""
    layers = keras.layers
    keras.config.set_dtype_policy("mixed_float16")
    try:
        given = layers.Input((7,), dtype="float32")
        hidden = layers.Dense(8, "tanh")(given[:, :6])
        output = layers.Dense(2, dtype="float32")(hidden)
        scaled = output * given[:, 6:]
        return keras.Model(given, output + (scaled - keras.ops.stop_gradient(scaled)))
    finally:
        keras.config.set_dtype_policy("float32")


def custom_step(keras: Any) -> Any:
    """A model with a custom train_step."""

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inside = dense(keras)
            self.tracker = keras.metrics.Mean("loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def call(self, x: Any) -> Any:
            return self.inside(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            if keras.backend.backend() == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = keras.ops.mean((self(x, training=True) - y) ** 2)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
            else:
                import torch

                self.zero_grad()
                loss = keras.ops.mean((self(x, training=True) - y) ** 2)
                loss.backward()
                gradients = [variable.value.grad for variable in self.trainable_variables]
                with torch.no_grad():
                    self.optimizer.apply(gradients, self.trainable_variables)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    return Model()


def experts(keras: Any, alone: bool = False) -> Any:
    """A model in which each rank uses other layers. No rank uses the last ones.

    In one process the first rows of a batch are those of rank 0.
    """

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inside = dense(keras)
            self.experts = [keras.layers.Dense(2) for _ in range(3)]
            for layer in self.experts:
                layer.build((None, 2))

        def call(self, x: Any) -> Any:
            hidden = self.inside(x)
            if not alone:
                return self.experts[hvd.rank()](hidden)
            parts = [self.experts[0](hidden[:LOCAL]), self.experts[1](hidden[LOCAL:])]
            return keras.ops.concatenate(parts, axis=0)

    return Model()


def experts_alone(keras: Any) -> Any:
    return experts(keras, alone=True)


def _sgd(**options: Any) -> Callable[[Any], Any]:
    return lambda keras: keras.optimizers.SGD(**{"learning_rate": 0.05, "momentum": 0.9, **options})


def _adam(**options: Any) -> Callable[[Any], Any]:
    return lambda keras: keras.optimizers.Adam(**{"learning_rate": 0.01, **options})


def _scaled(scale: float) -> Callable[[Any], Any]:
    """An optimizer with a loss scale, which grows with the batch size so that rounding is equal."""
    inner = _sgd(learning_rate=0.01)
    return lambda keras: keras.optimizers.LossScaleOptimizer(inner(keras), initial_scale=scale)


# For what does not depend on the backend: TensorFlow builds a graph for each case, for seconds.
ON_TORCH = ("torch",)

CASES: dict[str, Case] = {
    "sgd": Case(dense, _sgd()),
    "adam": Case(dense, _adam()),
    "clipnorm": Case(dense, _sgd(clipnorm=0.05), backends=ON_TORCH),
    "global_clipnorm": Case(dense, _sgd(global_clipnorm=0.05), backends=ON_TORCH),
    "accumulation": Case(dense, _sgd(gradient_accumulation_steps=2)),
    "passes": Case(
        dense,
        _sgd(),
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        plain=_sgd(gradient_accumulation_steps=2),
    ),
    "summed passes": Case(
        dense,
        _sgd(learning_rate=0.02),
        {"backward_passes_per_step": 2},
        plain=_sgd(gradient_accumulation_steps=2, learning_rate=0.04),
        backends=ON_TORCH,
    ),
    # With SGD, because Adam learns the same from a sum as from an average.
    "embedding": Case(embedding, _sgd(), data=words),
    "embedding as dense": Case(embedding, _sgd(), {"sparse_as_dense": True}, data=words),
    "frozen": Case(frozen, _adam(), backends=ON_TORCH),
    # Gradients have 11 significant bits, and processors add up float16 in different ways.
    "float16": Case(
        half, _sgd(learning_rate=0.01), plain=_scaled(2**16), data=overflowing, tolerance=1e-4
    ),
    "float16 wrapped": Case(
        half, _scaled(2**15), plain=_scaled(2**16), data=overflowing, tolerance=1e-4
    ),
    "custom step": Case(custom_step, _adam(), plain_model=dense),
    "experts": Case(experts, _sgd(weight_decay=0.1), plain_model=experts_alone),
    "eager": Case(dense, _adam(), compile={"run_eagerly": True}),
    "unbuilt": Case(unbuilt, _adam(), plain_model=dense),
    "executions": Case(
        dense, _adam(), compile={"steps_per_execution": 4}, backends=("tensorflow",)
    ),
    "jit": Case(dense, _adam(), compile={"jit_compile": True}, backends=("tensorflow",)),
    "sum": Case(dense, _sgd(), {"op": "Sum"}, plain=_sgd(learning_rate=0.1)),
    "predivide": Case(dense, _sgd(), {"gradient_predivide_factor": 2.0}, backends=ON_TORCH),
    "groups": Case(dense, _sgd(), {"groups": 2}, backends=ON_TORCH),
    "listed groups": Case(
        dense,
        _sgd(),
        {"groups": lambda model: [model.trainable_variables[1:], model.trainable_variables[:0]]},
        backends=ON_TORCH,
    ),
    "embedding passes": Case(
        embedding,
        _adam(),
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        plain=_adam(gradient_accumulation_steps=2),
        data=words,
    ),
    "batch norm": Case(synchronized, _sgd(), plain_model=normalized),
    "fp16": Case(dense, _sgd(), {"compression": "fp16"}, tolerance=5e-3, backends=ON_TORCH),
    "predivided groups in fp16": Case(
        dense,
        _sgd(),
        {"gradient_predivide_factor": 2.0, "groups": 2, "compression": "fp16"},
        tolerance=5e-3,
        backends=("tensorflow",),
    ),
    "bf16": Case(dense, _sgd(), {"compression": "bf16"}, tolerance=5e-2, backends=ON_TORCH),
    "bf16 embedding": Case(embedding, _adam(), {"compression": "bf16"}, data=words, tolerance=5e-2),
}


def cases_of(backend: str) -> list[str]:
    return [name for name, case in CASES.items() if backend in case.backends]


def rows_of_rank(array: Any, rank: int, size: int) -> Any:
    """Return a rank's part of every global batch."""
    batches = array.reshape(STEPS, size, LOCAL, *array.shape[1:])
    return batches[:, rank].reshape(STEPS * LOCAL, *array.shape[1:])


def train_all(names: list[str]) -> list[dict[str, Any]]:
    """Train all cases; returns the results of every rank."""
    hvd.init()
    return list(hvd.allgather_object({name: train(CASES[name]) for name in names}))


def train(case: Case) -> dict[str, Any]:
    """Train on both ranks, and on rank 0 in one process, too."""
    results = {"ranks": _fit(case, hvd.rank(), hvd.size())}
    if hvd.rank() == 0:
        results["one"] = _alone(case)
    return results


_ALONE: dict[Any, dict[str, Any]] = {}


def _alone(case: Case) -> dict[str, Any]:
    """The training in one process, which is the same for many cases."""
    import keras

    optimizer = keras.saving.serialize_keras_object((case.plain or case.optimizer)(keras))
    key = (case.plain_model or case.model, case.data, repr(optimizer))
    if key not in _ALONE:
        _ALONE[key] = _fit(case, 0, 1)
    return _ALONE[key]


def _fit(case: Case, rank: int, size: int) -> dict[str, Any]:
    """Train as one of ``size`` ranks; a single rank trains without Horovod."""
    import keras

    set_seed(100 + rank)
    model = (case.model if size > 1 else case.plain_model or case.model)(keras)
    x, y = (case.data or numbers)(STEPS * LOCAL * hvd.size())
    callbacks: list[Any] = []
    if size > 1:
        options = dict(case.distributed)
        for name, namespace in (("op", hvd), ("compression", hvd.Compression)):
            if name in options:
                options[name] = getattr(namespace, options[name])
        if callable(options.get("groups")):
            options["groups"] = options["groups"](model)
        optimizer = hvd.DistributedOptimizer(case.optimizer(keras), **options)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        x, y = (rows_of_rank(part, rank, size) for part in (x, y))
    else:
        optimizer = (case.plain or case.optimizer)(keras)

    class RecordWeights(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            state = [numpy.array(weights) for weights in model.get_weights()]
            scale = getattr(model.optimizer, "dynamic_scale", None)
            state += [] if scale is None else [keras.ops.convert_to_numpy(scale)]
            states.append(state)

    states: list[Any] = []
    model.compile(optimizer, loss="mse", **(case.compile if size > 1 else {}))
    history = model.fit(
        x,
        y,
        batch_size=LOCAL * (1 if size > 1 else hvd.size()),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, RecordWeights()],
    )
    return {"losses": history.history["loss"], "weights": states}
