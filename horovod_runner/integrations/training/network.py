"""The network of `fit`: makes it, and tells the framework that it is of."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal

import numpy as np

from horovod_runner.integrations.training.training import Precision

Kind = Literal["torch", "keras", "lightning"]


def made(model: Any, seed: int, precision: Precision = "float32") -> Any:
    """The model, made if ``model`` is a class or a function that makes it.

    It is made again if that has imported a framework, in which nothing could be seeded before.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(model, type) and _bases(model) & {"Module", "Model"}:
        return model
    if not callable(model):
        raise TypeError(
            "model must be a torch module, a Keras model or a Lightning module, or a class or "
            f"function that makes it, not {model!r}"
        )
    while True:
        before = _imported()
        with _seeded(seed), _policy(precision):
            network = model()
        if _imported() == before:
            return network


def _imported() -> set[str]:
    """The frameworks that are seeded here."""
    return {"torch", "keras"} & set(sys.modules)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed what networks draw their weights from; Python's and NumPy's state return afterwards."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "keras" in sys.modules:
        from horovod_runner.integrations.training.keras import set_seed

        set_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def _policy(precision: Precision) -> Iterator[None]:
    """Let the layers of Keras that are made meanwhile compute in a type of numbers."""
    keras = sys.modules.get("keras")
    if keras is None or precision == "float32":
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{precision}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _bases(model: Any) -> set[str]:
    """The names of the classes of frameworks that a model is of."""
    homes = ("torch.", "keras.", "lightning.", "pytorch_lightning.")
    return {
        base.__name__ for base in type(model).__mro__ if f"{base.__module__}.".startswith(homes)
    }


def kind_of(model: Any) -> Kind:
    """Which framework a model is of.

    Raises:
        TypeError: of none.
    """
    bases = _bases(model)
    if "LightningModule" in bases:
        return "lightning"
    if "Model" in bases:  # before torch: a model of Keras on torch is a module, too
        return "keras"
    if "Module" in bases:
        return "torch"
    raise TypeError(
        "model must be a torch module, a Keras model or a Lightning module, or a class or function "
        f"that makes it; it made {model!r}"
    )


def training_class(kind: Kind) -> type[Any]:
    """What trains a network of a framework: of the file with its name, imported only now."""
    module = import_module(f"horovod_runner.integrations.training.{kind}")
    found: type[Any] = getattr(module, f"{kind.capitalize()}Training")
    return found
