"""Models of Keras 3, on its TensorFlow and torch backends."""

from __future__ import annotations

import inspect
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import cloudpickle
import numpy as np

from horovod_runner.common.by_value import by_value
from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.kind import Call, Parts
from horovod_runner.errors import PredictionError
from horovod_runner.host.scratch import temporary_folder

_MODEL: Final = "model.keras"
_OBJECTS: Final = "objects"


@dataclass(frozen=True)
class KerasKind:
    """A model of Keras 3."""

    backend: str  # in the process that made the model
    framework: Framework = "tensorflow"
    # Classes and functions of the user's, by the name that Keras saves.
    custom_objects: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, custom_objects: Mapping[str, Any] = {}) -> KerasKind:
        """The kind of the models in this process."""
        backend = sys.modules["keras"].backend.backend()
        return cls(backend, custom_objects=tuple(custom_objects.items()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "custom_objects": ()}  # they are in the file

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Write the model in Keras's format, and the user's own classes and functions beside it."""
        draft = path.with_name(f"{path.name}.{_MODEL}")
        model.save(draft)
        with zipfile.ZipFile(draft) as saved:
            config = json.loads(saved.read("config.json"))
        with by_value(ship_modules):
            objects = {**own_objects(model, config), **dict(self.custom_objects)}
            pickled = cloudpickle.dumps(objects, protocol=5)
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
            archive.write(draft, _MODEL)
            archive.writestr(_OBJECTS, pickled)
        draft.unlink()

    def load(self, path: Path, device: str) -> Call:
        """Read the model, with Keras on the backend that it was made with."""
        keras = _keras(self.backend)
        model = read_model(path)
        names = input_names(model)
        number = int(device.rpartition(":")[2]) if device.startswith("cuda") else None
        on = "cpu:0" if number is None else f"gpu:{number}"

        def call(parts: Parts) -> Any:
            with keras.device(on):
                return model.predict_on_batch(arranged(readable(parts), names))

        return call


def arranged(parts: Parts, names: Sequence[str]) -> Any:
    """The inputs of a model: one value, or several, by name if the model has inputs so called."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return dict(parts) if set(parts) == set(names) else list(parts.values())


def readable(parts: Parts) -> Parts:
    """Parts that Keras can read: if text or ragged rows are among them, tensors of TensorFlow."""
    odd = [name for name, value in parts.items() if isinstance(value, list)]
    if not odd:
        return parts
    backend = sys.modules["keras"].backend.backend()
    if backend != "tensorflow":
        raise PredictionError(
            f"the model gets text or ragged rows, {', '.join(odd)}, and Keras's backend is "
            f"{backend}, which has no tensors of them: set KERAS_BACKEND=tensorflow, or make "
            "numbers of them, with transform or pad_ragged"
        )
    import tensorflow as tf

    def tensor(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            return tf.RaggedTensor.from_row_lengths(np.concatenate(value), [*map(len, value)])
        return tf.convert_to_tensor(value, tf.string if isinstance(value, list) else None)

    return {name: tensor(value) for name, value in parts.items()}


def inputs_of(model: Any) -> list[Any]:
    """A model's inputs; empty for a subclass of keras.Model, which declares none."""
    try:
        return list(model.inputs or ())
    except (AttributeError, ValueError):  # a Sequential that is not built has none yet
        return []


def input_names(model: Any) -> list[str]:
    """The names of :func:`inputs_of`."""
    return [tensor.name for tensor in inputs_of(model)]


def read_model(path: Path) -> Any:
    """The model in a file of :meth:`KerasKind.write`, without its optimizer."""
    import keras

    with zipfile.ZipFile(path) as archive, temporary_folder("keras") as folder:
        objects = cloudpickle.loads(archive.read(_OBJECTS))
        objects = {name: _revivable(each) for name, each in objects.items()}
        unpacked = archive.extract(_MODEL, folder)
        # safe_mode refuses lambdas; the file comes from the user's own driver.
        return keras.models.load_model(
            unpacked, custom_objects=objects, compile=False, safe_mode=False
        )


def _revivable(kind: Any) -> Any:
    """A class that Keras can make from its config, also if it takes none of Keras's arguments.

    Keras writes "trainable" and "dtype" into the config of each layer and each model, and would
    pass them to a class whose ``__init__`` takes neither.
    """
    made_by = getattr(kind, "from_config", None)
    if not isinstance(kind, type) or not getattr(made_by, "__module__", "").startswith("keras."):
        return kind  # a function, or a class that the user has taught this
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return kind

    class Revived:
        @staticmethod
        def from_config(config: Mapping[str, Any]) -> Any:
            known = {name: value for name, value in config.items() if name in parameters}
            made = kind.from_config(known)
            if "trainable" in config:  # a layer's
                made.trainable = config["trainable"]
            return made

    return Revived


def _keras(backend: str) -> Any:
    """Keras on a backend."""
    if "keras" not in sys.modules:
        before = os.environ.get("KERAS_BACKEND")
        os.environ["KERAS_BACKEND"] = backend
        try:
            import keras
        finally:  # the next task of this process may be another program's
            os.environ.pop("KERAS_BACKEND")
            if before is not None:
                os.environ["KERAS_BACKEND"] = before
    import keras

    if keras.backend.backend() != backend:
        raise PredictionError(
            f"the model was made with Keras on {backend}, and this process of Spark has imported "
            f"Keras on {keras.backend.backend()}: set KERAS_BACKEND={backend} for the executors, "
            f"spark.executorEnv.KERAS_BACKEND, or begin a new Spark session"
        )
    return keras


def own_objects(model: Any, config: Any) -> dict[str, Any]:
    """Classes and functions that Keras does not bring, by the names it saves.

    The classes of the model and its layers; and what they hold or the user has registered, such as
    an activation or an initializer, if the saved ``config`` names it.
    """
    saving = sys.modules["keras"].saving
    layers = [model, *model._flatten_layers(include_self=False)]
    found = dict(saving.get_custom_objects())
    for value in (value for layer in layers for value in vars(layer).values()):
        own = value if isinstance(value, FunctionType) else type(value)
        if own is value or hasattr(own, "get_config"):
            # Keras 3.6 and older save a registered function by its own name.
            found |= dict.fromkeys((own.__name__, saving.get_registered_name(own)), own)
    texts = {*_texts(config)}
    found = {name: own for name, own in found.items() if name in texts}
    found |= {saving.get_registered_name(type(layer)): type(layer) for layer in layers}
    return {
        name: own
        for name, own in found.items()
        if not str(getattr(own, "__module__", "")).startswith("keras.")
    }


def _texts(config: Any) -> Iterator[str]:
    """The texts in a model's config, except how it was compiled, which is not read again."""
    if isinstance(config, str):
        yield config
    elif isinstance(config, list):
        for value in config:
            yield from _texts(value)
    elif isinstance(config, dict):
        for key, value in config.items():
            if key != "compile_config":
                yield from _texts(value)
