"""Makes code that was written for Horovod's own modules right on Keras 3, in a rank.

``horovod.keras`` and ``horovod.tensorflow.keras`` train without averaging anything there, and do
not say so: whoever imports them gets :mod:`horovod_runner.keras`, and a line that tells.
``horovod.tensorflow`` stays what it is, but for two functions that do not know Keras 3's variables.
Where ``tf.keras`` is Keras 2 (TF_USE_LEGACY_KERAS), Horovod's own code works, and is left alone
but for one import.

Every worker imports this module: what it needs when Horovod's are asked for is imported then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from horovod_runner.context import current_rank, log_to_driver

if TYPE_CHECKING:
    from importlib.abc import Loader

_KERAS = ("horovod.keras", "horovod.tensorflow.keras")


def keras_on_import() -> None:
    """Watch over the imports of this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Of ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        if fullname == "horovod.tensorflow":
            return _mended_spec(_mend_tensorflow, fullname, path, target)
        for name in _KERAS:
            if fullname == name or fullname.startswith(f"{name}."):
                if not _is_keras_3(name):
                    return _mended_spec(_mend_legacy, fullname, path, target)
                own = f"horovod_runner.keras{fullname.removeprefix(name)}"
                loader: Any = _Instead(own)
                return ModuleSpec(fullname, loader, is_package=fullname == name)
        return None


class _Instead:
    """Makes a module with the names of another one."""

    def __init__(self, own: str) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        own = import_module(self._own)
        module.__doc__ = own.__doc__
        module.__getattr__ = lambda name: getattr(own, name)  # type: ignore[method-assign]
        module.__dir__ = lambda: dir(own)  # type: ignore[method-assign]
        module.__all__ = list(dir(own))  # type: ignore[attr-defined]
        _announce(module.__name__)


class _Mended:
    """Loads a module as another loader does, and mends it."""

    def __init__(self, plain: Loader, mend: Callable[[Any], None]) -> None:
        self._plain = plain
        self._mend = mend

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        self._mend(module)


def _mended_spec(
    mend: Callable[[Any], None], name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder):
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                mended: Any = _Mended(spec.loader, mend)
                spec.loader = mended
                return spec
    return None


def _is_keras_3(name: str) -> bool:
    """Whether what that module would work on is Keras 3."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and name == "horovod.tensorflow.keras":
        return False  # it asks TensorFlow for its Keras
    from importlib import metadata

    try:
        return int(metadata.version("keras").partition(".")[0]) >= 3
    except (metadata.PackageNotFoundError, ValueError):
        return False


@cache
def _announce(name: str) -> None:
    if current_rank() == 0 and name in _KERAS:
        from importlib import metadata

        log_to_driver(
            f"HorovodRunner: {name} does not average gradients on Keras "
            f"{metadata.version('keras')}: horovod_runner.keras takes its place. To make this line "
            "go away: import horovod_runner.keras as hvd, and use its DistributedOptimizer"
        )


def _mend_legacy(module: Any) -> None:
    """Horovod takes ``tf.keras`` for its classes, and the package ``keras`` for its functions."""
    own = getattr(module, "keras", None)
    if hasattr(module, "K") and own is not None:
        module.K = own.backend


def _mend_tensorflow(hvd: Any) -> None:
    """Let functions take Keras 3's variables, which hold a ``tf.Variable`` each."""
    plain_broadcast = hvd.broadcast_variables
    plain_gradient = hvd._DistributedGradientTape.gradient

    def broadcast_variables(variables: Any, root_rank: int, *args: Any, **kwargs: Any) -> Any:
        # The states of Keras 3's random generators are among a model's variables. They have to
        # differ: each rank drops out units of its own.
        own = [_unwrapped(variable) for variable in variables]
        kept = [variable for variable in own if variable.dtype != "uint32"]
        return plain_broadcast(kept, root_rank, *args, **kwargs)

    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_gradient(self, target, [_unwrapped(s) for s in sources], *args, **kwargs)

    hvd.broadcast_variables = broadcast_variables
    hvd._DistributedGradientTape.gradient = gradient


def _unwrapped(variable: Any) -> Any:
    keras = sys.modules.get("keras")
    kind = getattr(keras, "Variable", None)
    return variable.value if kind is not None and isinstance(variable, kind) else variable
