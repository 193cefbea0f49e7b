"""Scripts in the style of Horovod's documentation, for Keras and for TensorFlow 2."""

from __future__ import annotations

from typing import Any

import numpy

from tests.real.keras_names import translated


def _digits(rank: int, size: int) -> tuple[Any, Any]:
    random = numpy.random.default_rng(11)
    labels = random.integers(0, 4, size=256)
    images = random.normal(size=(256, 16)) + 2.0 * numpy.eye(4, 16)[labels]
    return images[rank::size].astype("float32"), labels[rank::size]


def keras_script() -> dict[str, Any]:
    """A model.fit with all steps of Horovod's page on Keras."""
    import horovod.tensorflow.keras as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    x, y = _digits(hvd.rank(), hvd.size())
    keras.utils.set_random_seed(7 + hvd.rank())
    model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
    scaled_lr = 0.005 * hvd.size()
    opt = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=opt, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=5),
    ]
    history = model.fit(x, y, batch_size=16, epochs=4, callbacks=callbacks, verbose=0)
    return {
        "module": type(opt).__mro__[1].__module__,
        "weights": hvd.allgather(model.get_weights()[0][None]).numpy(),
        "history": history.history,
    }


def tensorflow_script(optimizer_averages: bool) -> dict[str, Any]:
    """A custom loop with the gradient tape, or with the optimizer of ``horovod.tensorflow``."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    x, y = _digits(hvd.rank(), hvd.size())
    keras.utils.set_random_seed(7 + hvd.rank())
    layers = [
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(4),
    ]
    model = keras.Sequential(layers)
    opt = keras.optimizers.Adam(0.005 * hvd.size())
    if optimizer_averages:
        opt = hvd.DistributedOptimizer(opt)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat().take(40)

    @tf.function  # type: ignore[untyped-decorator]
    def training_step(images: Any, labels: Any, first_batch: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if not optimizer_averages:
            tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
        return loss

    with translated() as modules:
        losses = [
            float(training_step(images, labels, batch == 0))
            for batch, (images, labels) in enumerate(batches)
        ]
    weights = [v.numpy() for v in (*model.trainable_variables, *opt.variables)]
    seeds = [v.numpy().tolist() for v in model.non_trainable_variables]
    return {
        "weights": [list(ranks) for ranks in zip(*hvd.allgather_object(weights), strict=True)],
        "seeds": hvd.allgather_object(seeds),
        "losses": losses,
        "translated": modules,
    }


def _trained_locally(x: Any, y: Any) -> Any:
    """The weights of a layer of Keras 2 that its rank keeps for itself."""
    import tf_keras

    from horovod_runner.keras import PartialDistributedOptimizer  # ranks get it as horovod.keras's

    tf_keras.utils.set_random_seed(7)
    model = tf_keras.Sequential([tf_keras.layers.Dense(4, input_shape=(16,))])
    optimizer = PartialDistributedOptimizer(
        tf_keras.optimizers.SGD(0.1), local_layers=model.layers[0]
    )
    model.compile(optimizer, tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, epochs=1, verbose=0)
    return model.get_weights()[0]


def legacy_script() -> dict[str, Any]:
    """Keras 2, which TensorFlow still supports, with Horovod's horovod.tensorflow.keras.

    With the names that Keras 3 has dropped.
    """
    import horovod.tensorflow.keras as hvd
    import tf_keras

    from horovod_runner.keras.reporting import LogCallback

    hvd.init()
    x, y = _digits(hvd.rank(), hvd.size())
    tf_keras.utils.set_random_seed(7 + hvd.rank())
    model = tf_keras.Sequential([tf_keras.layers.Dense(4, input_shape=(16,))])
    opt = hvd.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(lr=0.1))
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=opt, experimental_run_tf_function=False)
    tf_keras.backend.set_value(opt.lr, 0.05)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        LogCallback(),
    ]
    batches = [(x[begin : begin + 16], y[begin : begin + 16]) for begin in range(0, len(x), 16)]
    model.fit_generator(
        iter(batches * 2), len(batches), epochs=2, callbacks=callbacks, verbose=0, workers=1
    )
    return {
        "file": hvd.__file__,
        "old names": (float(tf_keras.backend.get_value(opt.lr)), len(opt.variables())),
        "local weights": hvd.allgather(_trained_locally(x, y)[None]).numpy(),
        "weights": hvd.allgather(model.get_weights()[0][None]).numpy(),
    }
