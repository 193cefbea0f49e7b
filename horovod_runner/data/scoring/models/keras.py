"""Models of Keras 3, on its TensorFlow and torch backends."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import cloudpickle

from horovod_runner.common.by_value import by_value
from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.kind import Call, Parts
from horovod_runner.errors import PredictionError
from horovod_runner.host.scratch import temporary_folder

_MODEL: Final = "model.keras"
_CLASSES: Final = "classes"


@dataclass(frozen=True)
class KerasKind:
    """A model of Keras 3.

    Attributes:
        backend: Keras's backend in the process that made the model.
        custom_objects: classes and functions of the user's, by the name that Keras saves.
    """

    backend: str
    framework: Framework = "tensorflow"
    custom_objects: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, model: Any, custom_objects: Mapping[str, Any] = {}) -> KerasKind:
        """The kind of a model in this process."""
        backend = sys.modules["keras"].backend.backend()
        return cls(backend, custom_objects=tuple(custom_objects.items()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "custom_objects": ()}  # they are in the file

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Write the model in Keras's format, with the user's own classes beside it."""
        draft = path.with_name(f"{path.name}.{_MODEL}")
        model.save(draft)
        with by_value(ship_modules):
            objects = {**own_classes(model), **dict(self.custom_objects)}
            classes = cloudpickle.dumps(objects, protocol=5)
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
            archive.write(draft, _MODEL)
            archive.writestr(_CLASSES, classes)
        draft.unlink()

    def load(self, path: Path, device: str) -> Call:
        """Read the model, with Keras on the backend that it was made with."""
        keras = _keras(self.backend)
        model = read_model(path)
        names = input_names(model)
        number = int(device.rpartition(":")[2]) if device.startswith("cuda") else None
        on = "cpu:0" if number is None else f"gpu:{number}"

        def call(parts: Parts) -> Any:
            values: Any = dict(parts)
            if len(parts) == 1:
                values = next(iter(parts.values()))
            elif set(parts) != set(names):
                values = list(parts.values())
            with keras.device(on):
                return model.predict_on_batch(values)

        return call


def input_names(model: Any) -> list[str]:
    """The names of a model's inputs; empty for a subclass of keras.Model, which declares none."""
    try:
        inputs = model.inputs
    except (AttributeError, ValueError):  # a Sequential that is not built has none yet
        return []
    return [tensor.name for tensor in inputs or ()]


def read_model(path: Path) -> Any:
    """The model in a file of :meth:`KerasKind.write`, without its optimizer."""
    import keras

    with zipfile.ZipFile(path) as archive, temporary_folder("keras") as folder:
        classes = cloudpickle.loads(archive.read(_CLASSES))
        unpacked = archive.extract(_MODEL, folder)
        # safe_mode refuses lambdas; the file comes from the user's own driver.
        return keras.models.load_model(
            unpacked, custom_objects=classes, compile=False, safe_mode=False
        )


def _keras(backend: str) -> Any:
    """Keras on a backend.

    Raises:
        PredictionError: this process has imported it with another one.
    """
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


def own_classes(model: Any) -> dict[str, Any]:
    """Classes of the model and its layers that Keras does not bring, by the names it saves."""
    keras = sys.modules["keras"]
    layers = [model, *model._flatten_layers(include_self=False)]
    classes = {type(layer) for layer in layers}
    return {
        keras.saving.get_registered_name(kind): kind
        for kind in classes
        if not kind.__module__.startswith("keras.")
    }
