"""Copies a Keras model with its optimizer, so that the copy can be saved during the training."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from horovod_runner.common.files import is_full, write_problem
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.problems import FULL_TEMPORARY
from horovod_runner.host.scratch import temporary_folder


def is_keras_model(state: Any) -> bool:
    """Whether a value is a Keras model. Does not import Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(state, keras.Model)


def keras_variables(model: Any) -> list[Any]:
    """A Keras model's weights and its optimizer's state, without states of random generators."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None else ())]


class KerasCopier:
    """Copies models into a clone, which is reused while the model stays the same."""

    def __init__(self) -> None:
        self._made_of: list[Any] = []
        self._clone: Any = None

    def copy(self, model: Any) -> Callable[[Path], object]:
        """Copy a model's weights and optimizer state; returns what saves the copy to a file.

        A model that Keras cannot clone is saved to memory before this returns.
        """
        # Keras creates the optimizer's variables late.
        fits = self._clone is None or _same_shapes(self._clone, model)
        made_of = _made_of(model)
        if self._made_of != made_of or not fits:
            self._made_of, self._clone = made_of, _clone_of(model)
        if self._clone is None:
            saved = _saved(model)
            return lambda path: path.write_bytes(saved)
        targets, sources = keras_variables(self._clone), keras_variables(model)
        for target, source in zip(targets, sources, strict=True):
            target.assign(source)
        return partial(_save, self._clone)


def _made_of(model: Any) -> list[Any]:
    """What a clone depends on: the model, its last compile(), and which layers are trained."""
    trained = (layer.trainable for layer in model._flatten_layers())
    return [model, getattr(model, "_compile_config", None), *trained]


def _same_shapes(model: Any, other: Any) -> bool:
    shapes, others = ([v.shape for v in keras_variables(each)] for each in (model, other))
    return shapes == others


def _clone_of(model: Any) -> Any:
    """A new model with the same layers and optimizer; None if Keras cannot make one."""
    keras = sys.modules["keras"]
    try:
        if any(hasattr(layer, "save_assets") for layer in model._flatten_layers()):
            return None  # a clone has no vocabulary of a lookup: it is not among the weights
        clone = keras.models.clone_model(model)
        if not clone.built:
            clone.build(model.input_shape)
        if getattr(model, "compiled", False):
            clone.compile_from_config(model.get_compile_config())
            if clone.optimizer is not None and model.optimizer.built:
                clone.optimizer.build(clone.trainable_variables)
        return clone if _same_shapes(clone, model) else None
    except Exception:
        return None  # for example a subclassed model: it is saved while the training waits


def _saved(model: Any) -> bytes:
    with temporary_folder("keras") as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        return path.read_bytes()


def _save(model: Any, path: Path) -> None:
    # On a local disk, and then copied: Keras seeks in the file, which a mounted store may refuse.
    with temporary_folder("keras") as folder:
        saved = Path(folder) / path.name
        try:
            model.save(saved)
        except OSError as error:
            if not is_full(error):
                raise
            raise CheckpointError(f"{write_problem(error, folder)}. {FULL_TEMPORARY}") from error
        shutil.copyfile(saved, path)
