"""Knows the layers for batch normalization of this process.

A loss of torch does not always show what computed it, and Keras's layers are needed before a loss
is there. Python's garbage collector would not do: after ``gc.freeze()``, as of an import of Keras
or of a user's own, it lists none of the objects that were made before.
"""

from __future__ import annotations

import weakref
from typing import Any

torch_layers: weakref.WeakSet[Any] = weakref.WeakSet()
keras_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_torch(module: Any) -> None:
    """Note the layers of torch; called with ``torch.nn.modules.batchnorm``."""
    _watch(module._BatchNorm, torch_layers)


def watch_keras(module: Any) -> None:
    """Note the layers of Keras; called with the module that has ``BatchNormalization``."""
    _watch(module.BatchNormalization, keras_layers)


def _watch(kind: Any, layers: weakref.WeakSet[Any]) -> None:
    # Not by __init__, which is not called for copies, nor for layers that were pickled.
    plain = kind.__new__

    def new(cls: Any, *args: Any, **options: Any) -> Any:
        layer = plain(cls) if plain is object.__new__ else plain(cls, *args, **options)
        layers.add(layer)
        return layer

    kind.__new__ = new
