"""Names of Keras 2 and TensorFlow 1 that code still uses, and what to write today."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Library = Literal["Keras 2", "TensorFlow 1"]


class OldName(NamedTuple):
    """A name that no longer exists.

    Attributes:
        library: what code that uses it was written for.
        now: what to write today.
        keras_2: what to write for the latest Keras 2, where it does not do what the code means.
    """

    library: Library
    now: str
    keras_2: str = ""


_CONFIG = (
    "tf.config.set_visible_devices and tf.config.experimental.set_memory_growth, if at all: a rank "
    "has its own GPU already"
)
_DROPPED_EARLIER = "The latest Keras 2 has dropped it too: change it in any case."

#: Methods and attributes of models and optimizers.
ATTRIBUTES: Final = {
    "fit_generator": OldName("Keras 2", "model.fit(...), with the same arguments"),
    "evaluate_generator": OldName("Keras 2", "model.evaluate(...), with the same arguments"),
    "predict_generator": OldName("Keras 2", "model.predict(...), with the same arguments"),
    "predict_classes": OldName(
        "Keras 2",
        "model.predict(x).argmax(axis=-1), or (model.predict(x) > 0.5) of one output",
        _DROPPED_EARLIER,
    ),
    "predict_proba": OldName("Keras 2", "model.predict(x)", _DROPPED_EARLIER),
    "lr": OldName("Keras 2", "optimizer.learning_rate"),
    "get_weights": OldName("Keras 2", "[v.numpy() for v in optimizer.variables]"),
    "set_weights": OldName("Keras 2", "v.assign(value) for each v in optimizer.variables"),
    "get_updates": OldName("Keras 2", "optimizer.apply_gradients(zip(gradients, variables))"),
    "minimize": OldName("Keras 2", "optimizer.apply_gradients(zip(gradients, variables))"),
}

#: Functions of ``keras.backend``. ``tf.keras.backend`` has kept those that need no session.
BACKEND: Final = {
    "get_session": OldName(
        "TensorFlow 1", "variable.numpy() for a value: TensorFlow 2 runs without sessions"
    ),
    "set_session": OldName("TensorFlow 1", _CONFIG),
    "set_value": OldName("Keras 2", "variable.assign(value), or optimizer.learning_rate = value"),
    "get_value": OldName("Keras 2", "variable.numpy(), or float(optimizer.learning_rate.numpy())"),
}

#: Keyword arguments, by the function that took them.
KEYWORDS: Final = {
    ("compile", "experimental_run_tf_function"): OldName(
        "Keras 2", "compile(...) without experimental_run_tf_function"
    ),
    **{
        (function, name): OldName(
            "Keras 2", f"{function}(...) without {name}: a keras.utils.PyDataset takes it"
        )
        for function in ("fit", "evaluate", "predict")
        for name in ("workers", "use_multiprocessing", "max_queue_size")
    },
}

#: Keyword arguments of optimizers.
OPTIMIZER_KEYWORDS: Final = {
    "lr": OldName(
        "Keras 2",
        "learning_rate=",
        "Keras 2's latest optimizers ignore lr=, with a warning: write learning_rate= there too, "
        "or use tf.keras.optimizers.legacy.",
    ),
    "decay": OldName("Keras 2", "a keras.optimizers.schedules.InverseTimeDecay as learning_rate"),
}

#: What Keras 3 says of the names of files.
FILE_ERRORS: Final = (
    "the filepath provided must end in `.weights.h5`",
    "The filepath provided must end in `.keras`",
    "The filename must end in `.weights.h5`",
    "Invalid filepath extension for saving",
    "The `save_format` argument is deprecated in Keras 3",
)
FILES: Final = OldName(
    "Keras 2", "a path that ends with .keras or .h5, or for weights alone with .weights.h5"
)
CALLED_LIST: Final = OldName("Keras 2", ".variables and .weights without the parentheses")
LEGACY_OPTIMIZERS: Final = OldName("Keras 2", "keras.optimizers instead of keras.optimizers.legacy")
OLD_BACKEND: Final = OldName("Keras 2", "the functions of keras.ops")

#: Modules of Keras 2, and where their contents are now; "" for the same place in ``tf.keras``.
MODULES: Final = {
    "keras.layers.normalization": "keras.layers",
    "keras.layers.core": "keras.layers",
    "keras.layers.convolutional": "keras.layers",
    "keras.layers.pooling": "keras.layers",
    "keras.layers.recurrent": "keras.layers",
    "keras.layers.embeddings": "keras.layers",
    "keras.layers.merge": "keras.layers",
    "keras.layers.noise": "keras.layers",
    "keras.layers.advanced_activations": "keras.layers",
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.utils.np_utils": "keras.utils",
    "keras.optimizers.legacy": "keras.optimizers",
    "keras.engine.topology": "keras.layers",
}
#: Names that the package keras has lost, and tf.keras has kept: module, names.
ONLY_IN_TF_KERAS: Final = {
    "keras.preprocessing.image": (
        "ImageDataGenerator",
        "DirectoryIterator",
        "NumpyArrayIterator",
        "Iterator",
    ),
    "keras.preprocessing.text": ("Tokenizer", "one_hot", "text_to_word_sequence"),
    "keras.preprocessing.sequence": ("TimeseriesGenerator", "make_sampling_table", "skipgrams"),
}

# Losses: what tf.keras has kept, and what the package keras has kept.
_LOSSES: Final = {
    "MSE": "mean_squared_error",
    "MAE": "mean_absolute_error",
    "MAPE": "mean_absolute_percentage_error",
    "MSLE": "mean_squared_logarithmic_error",
    "KLD": "kl_divergence",
    "logcosh": "log_cosh",
    "kullback_leibler_divergence": "kl_divergence",
}
_IN_TF_KERAS: Final = {long: short for short, long in reversed(_LOSSES.items())}
_IN_KERAS: Final = {**_LOSSES, **{short.lower(): long for short, long in _LOSSES.items()}}

#: Functions of TensorFlow 1 with the same meaning under another name.
TENSORFLOW: Final = {
    "log": "math.log",
    "div": "math.divide",
    "set_random_seed": "random.set_seed",
    "random_normal": "random.normal",
    "random_uniform": "random.uniform",
    "truncated_normal": "random.truncated_normal",
    "matrix_inverse": "linalg.inv",
    "is_nan": "math.is_nan",
    "to_float": "compat.v1.to_float",
    "to_int32": "compat.v1.to_int32",
    "to_int64": "compat.v1.to_int64",
    "logging": "compat.v1.logging",
    "gfile": "compat.v1.gfile",
}
#: Names of TensorFlow 1 for graphs and sessions: no line of today stands for one of these.
GRAPH: Final = frozenset(
    {
        *("Session", "InteractiveSession", "ConfigProto", "GPUOptions", "placeholder", "layers"),
        *("get_variable", "variable_scope", "global_variables_initializer", "app", "flags"),
        *("local_variables_initializer", "global_variables", "get_default_graph", "contrib"),
        *("trainable_variables", "assign", "reset_default_graph", "enable_eager_execution"),
        *("summary.FileWriter",),
        *("train.AdamOptimizer", "train.GradientDescentOptimizer", "train.MomentumOptimizer"),
        *("train.RMSPropOptimizer", "train.AdagradOptimizer", "train.MonitoredTrainingSession"),
        *("train.get_or_create_global_step", "train.Saver", "train.StopAtStepHook"),
        *("train.LoggingTensorHook", "losses.sparse_softmax_cross_entropy"),
        *("losses.softmax_cross_entropy", "estimator"),
    }
)


def tensorflow_1(name: str) -> OldName:
    """What to write for ``tf.name``, a name of TensorFlow 1."""
    if name in ("Session", "ConfigProto", "GPUOptions", "InteractiveSession"):
        now = _CONFIG
    elif name in TENSORFLOW:
        now = f"tf.{TENSORFLOW[name]}"
    else:
        now = f"TensorFlow 2's way, or tf.compat.v1.{name} for a graph"
    return OldName("TensorFlow 1", now)


def loss(module: str, name: str) -> str:
    """The name that a loss has today; "" if it has not changed.

    The module is "tensorflow.keras.losses", "keras.losses", or "metrics" instead of "losses".
    """
    package, _, last = module.rpartition(".")
    if last not in ("losses", "metrics"):
        return ""
    known = {"tensorflow.keras": _IN_TF_KERAS, "keras": _IN_KERAS}.get(package, {})
    return known.get(name, "")
