"""Changes ``model.fit`` in a rank: it takes feeds, validates on all rows, and averages at first."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.feed.rows_once import RowsOnce
from horovod_runner.worker import context
from horovod_runner.worker.imports.patches import instead_of


def patch(module: Any) -> None:
    """Change ``fit``; called with the module of the trainer of Keras's backend."""
    trainer = getattr(module, "TensorFlowTrainer", None) or module.TorchTrainer

    @instead_of(trainer, "fit")
    def fit(plain: Any, *args: Any, **options: Any) -> Any:
        if context.current() is None:
            return plain(*args, **options)
        try:
            arguments = inspect.signature(plain).bind(*args, **options).arguments
        except TypeError:  # Keras names the argument that is wrong
            return plain(*args, **options)
        _prepare(arguments)
        return plain(**arguments)


def _prepare(arguments: dict[str, Any]) -> None:
    """Change the arguments of ``fit``."""
    _weigh_classes(arguments)
    x = arguments.get("x")
    if isinstance(x, Feed):
        arguments["x"] = _loader(x, "x", arguments.pop("steps_per_epoch", None))
    if isinstance(x, Feed) or feed_behind(x) is not None:
        # The feed shuffles, and Keras warns that it does not.
        arguments.setdefault("shuffle", False)
    once = _validate_on_all_rows(arguments)
    module = sys.modules.get("horovod_runner.integrations.keras.callbacks")
    if module is not None:
        arguments["callbacks"] = module.averaged_first(arguments.get("callbacks"), once)


def _weigh_classes(arguments: dict[str, Any]) -> None:
    """Multiply the weights of a dataset's rows by those of their classes; Keras refuses both."""
    data: Any = arguments.get("x")
    weights = arguments.get("class_weight")
    if not weights or feed_behind(data) is None:
        return
    import tensorflow

    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) != 3 or not hasattr(spec[1], "shape"):
        return
    by_class = [float(weights.get(number, 1)) for number in range(max(weights) + 1)]

    def weigh(x: Any, y: Any, weight: Any) -> Any:
        if y.shape.rank > 1 and y.shape[-1] > 1:
            classes = tensorflow.argmax(y, axis=-1)
        else:
            classes = tensorflow.cast(tensorflow.round(tensorflow.reshape(y, [-1])), "int64")
        factors = tensorflow.gather(tensorflow.constant(by_class, weight.dtype), classes)
        return x, y, weight * factors

    arguments["x"] = data.map(weigh)
    arguments.pop("class_weight")


def _validate_on_all_rows(arguments: dict[str, Any]) -> RowsOnce[Any] | None:
    """Let the validation count each row of a Shard once; None for other data."""
    data = arguments.get("validation_data")
    steps = arguments.get("validation_steps")
    if isinstance(data, Feed):
        once: RowsOnce[Any] = RowsOnce(data)
        arguments["validation_data"] = _loader(once, "validation_data", steps)
    elif feed_behind(data) is None or _has_fixed_batch(arguments["self"]):
        return None
    else:
        from horovod_runner.data.feed import tf_feed

        found = tf_feed.rows_once(data)
        if found is None:
            return None
        dataset, once = found
        is_part = steps is not None and steps < len(once)
        arguments["validation_data"] = dataset.take(steps) if is_part else dataset
    arguments.pop("validation_steps", None)
    return once


def feed_behind(data: Any) -> Feed[Any] | None:
    """The feed whose batches a dataset of TensorFlow has, also after ``map``."""
    if "tensorflow" not in sys.modules:
        return None
    from horovod_runner.data.feed import tf_feed

    return tf_feed.feed_behind(data)


def _has_fixed_batch(model: Any) -> bool:
    """Whether a model takes batches of one size only."""
    from horovod_runner.data.scoring.models.keras import inputs_of

    return any(tensor.shape[:1] not in ((), (None,)) for tensor in inputs_of(model))


def _loader(feed: Feed[Any], name: str, steps: int | None) -> Any:
    """A feed of tensors as a DataLoader, which Keras takes."""
    import keras

    if keras.backend.backend() != "torch":
        raise TypeError(
            f"{name} is a feed of to_torch or batches, and Keras's backend is "
            f"{keras.backend.backend()}: pass a dataset of to_tf. Feeds of to_torch are for the "
            "torch backend, KERAS_BACKEND=torch"
        )
    from horovod_runner.data.feed.torch_feed import Batches

    return Batches(feed, steps).loader()
