"""Replaces modules of Horovod's in a rank: for Keras 3, and in elastic runs.

On Keras 3, ``horovod.keras`` and ``horovod.tensorflow.keras`` train without averaging gradients,
and say nothing. An import of them gives :mod:`horovod_runner.keras` instead, and prints a line.
``horovod.tensorflow`` stays, except two functions that do not know Keras 3's variables. Where
``tf.keras`` is Keras 2 (TF_USE_LEGACY_KERAS), Horovod's own modules work, and stay except for one
import.

``horovod.common.elastic`` is patched: a state comes back from the commits of the run. Modules of
torch, Keras and Spark are patched where a mistake in training code shows (`checks`).

Every worker imports this module. What the replacements need is imported only when they are used.
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

from horovod_runner.common.replacements import ReplacementLoader
from horovod_runner.worker.api import current_rank, log_to_driver

if TYPE_CHECKING:
    from importlib.abc import Loader

_KERAS = ("horovod.keras", "horovod.tensorflow.keras")


def keras_on_import() -> None:
    """Install the replacements for the imports of this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import finder for ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _PATCHES:
            return _patched_spec(_PATCHES[fullname], fullname, path, target)
        if not fullname.startswith("horovod."):
            return None
        for name in _KERAS:
            if fullname == name or fullname.startswith(f"{name}."):
                if not _is_keras_3(name):
                    return _patched_spec(_patch_legacy, fullname, path, target)
                replacement = f"horovod_runner.keras{fullname.removeprefix(name)}"
                loader: Any = _ReplacingLoader(replacement)
                return ModuleSpec(fullname, loader, is_package=fullname == name)
        return None


class _ReplacingLoader(ReplacementLoader):
    """Loads a module that has the contents of another one, and says so."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _announce(module.__name__)


class _PatchingLoader:
    """Loads a module with its own loader, and patches it.

    Args:
        loader: the module's own.
        patch: called with the loaded module.
    """

    def __init__(self, loader: Loader, patch: Callable[[Any], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._patch(module)


def _patched_spec(
    patch: Callable[[Any], None], name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder):
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                loader: Any = _PatchingLoader(spec.loader, patch)
                spec.loader = loader
                return spec
    return None


def _is_keras_3(name: str) -> bool:
    """Whether a module of Horovod's would use Keras 3."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and name == "horovod.tensorflow.keras":
        return False  # it uses tf.keras
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


def _patch_legacy(module: Any) -> None:
    """Make Horovod's functions use the Keras of its classes.

    It uses ``tf.keras`` for its classes, and the package ``keras`` for its functions.
    """
    keras = getattr(module, "keras", None)
    if hasattr(module, "K") and keras is not None:
        module.K = keras.backend


def _patch_tensorflow(hvd: Any) -> None:
    """Make functions accept Keras 3's variables, which hold a ``tf.Variable`` each."""
    original_broadcast = hvd.broadcast_variables
    original_gradient = hvd._DistributedGradientTape.gradient

    def broadcast_variables(variables: Any, root_rank: int, *args: Any, **kwargs: Any) -> Any:
        # A model's variables include the states of Keras 3's random generators. These must differ
        # between ranks: each rank draws its own dropout.
        unwrapped = [_unwrapped(variable) for variable in variables]
        weights = [variable for variable in unwrapped if variable.dtype != "uint32"]
        return original_broadcast(weights, root_rank, *args, **kwargs)

    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return original_gradient(self, target, [_unwrapped(s) for s in sources], *args, **kwargs)

    hvd.broadcast_variables = hvd.elastic.broadcast_variables = broadcast_variables
    hvd._DistributedGradientTape.gradient = gradient


def _patch_elastic(elastic: Any) -> None:
    # By its name: it is in a layer above this one.
    import_module("horovod_runner.elastic.horovod_states").patch(elastic)


def _patch_tensorflow_elastic(elastic: Any) -> None:
    """Make ``TensorFlowKerasState`` accept models and optimizers of Keras 3."""
    if not _is_keras_3("horovod.tensorflow.keras"):
        return

    def of_keras(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Not before it is used: it imports Keras.
            return getattr(import_module("horovod_runner.keras.elastic"), name)(*args, **kwargs)

        return call

    elastic.TensorFlowKerasState._save_model = of_keras("save_model")
    elastic.TensorFlowKerasState._load_model = of_keras("load_model")
    elastic._broadcast_model = of_keras("broadcast_model")


def _check(module: str, watch: str) -> Callable[[Any], None]:
    """A patch that calls a function of the package `checks`, which is imported only then."""

    def patch(patched: Any) -> None:
        getattr(import_module(f"horovod_runner.worker.checks.{module}"), watch)(patched)

    return patch


_PATCHES: dict[str, Callable[[Any], None]] = {
    "horovod.common.elastic": _patch_elastic,
    "horovod.tensorflow": _patch_tensorflow,
    "horovod.tensorflow.elastic": _patch_tensorflow_elastic,
    "horovod.torch.optimizer": _check("gradients", "watch_horovod"),
    "keras.src.callbacks.callback_list": _check("first_steps", "watch_keras"),
    "keras.src.saving.saving_api": _check("calls", "watch_keras_save"),
    "pyspark.context": _check("calls", "watch_spark"),
    "pyspark.core.context": _check("calls", "watch_spark"),
    "torch.amp.grad_scaler": _check("gradients", "watch_scaling"),
    "torch.nn.utils.clip_grad": _check("gradients", "watch_clipping"),
    "torch.optim.optimizer": _check("first_steps", "watch_torch"),
    "torch.serialization": _check("calls", "watch_torch_save"),
    "torch.utils.data.distributed": _check("calls", "watch_sampler"),
}


def _unwrapped(variable: Any) -> Any:
    keras = sys.modules.get("keras")
    kind = getattr(keras, "Variable", None)
    return variable.value if kind is not None and isinstance(variable, kind) else variable
