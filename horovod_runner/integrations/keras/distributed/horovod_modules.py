"""What an import of ``horovod.keras`` and ``horovod.tensorflow`` gives in a rank.

On Keras 3, ``horovod.keras`` and ``horovod.tensorflow.keras`` train without averaging gradients,
and say nothing. An import of them gives :mod:`horovod_runner.keras` instead, and prints a line.
``horovod.tensorflow`` stays, except what does not know Keras 3's variables. Where ``tf.keras`` is
Keras 2 (TF_USE_LEGACY_KERAS), Horovod's own modules work, and stay except for one import.

Ranks import this module with Horovod, and also where there is no Keras: it imports nothing large.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from horovod_runner.worker.api import current_rank, log_to_driver
from horovod_runner.worker.imports.replacements import ReplacementLoader

_REPLACED: Final = ("horovod.keras", "horovod.tensorflow.keras")
_TENSORFLOW: Final = "horovod_runner.integrations.keras.distributed.horovod_tensorflow"


def replace(horovod: Any) -> None:
    """Replace Horovod's modules for Keras from now on; called with the package ``horovod``."""
    del horovod
    if not any(isinstance(finder, _KerasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KerasFinder())


class _KerasFinder:
    """An import finder for ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for name in _REPLACED:
            is_there = fullname == name or fullname.startswith(f"{name}.")
            if is_there and is_keras_3(name):
                loader: Any = _KerasLoader(
                    f"horovod_runner.integrations.keras{fullname.removeprefix(name)}"
                )
                return ModuleSpec(fullname, loader, is_package=fullname == name)
        return None


class _KerasLoader(ReplacementLoader):
    """Loads a module that has the contents of another one, and says so."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _announce(module.__name__)


def is_keras_3(name: str) -> bool:
    """Whether a module of Horovod's, or one inside of it, would use Keras 3."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and name.startswith("horovod.tensorflow"):
        return False  # it uses tf.keras
    from importlib import metadata

    try:
        return int(metadata.version("keras").partition(".")[0]) >= 3
    except (metadata.PackageNotFoundError, ValueError):
        return False


@cache
def _announce(name: str) -> None:
    if current_rank() == 0 and name in _REPLACED:
        from importlib import metadata

        log_to_driver(
            f"HorovodRunner: {name} does not average gradients on Keras "
            f"{metadata.version('keras')}: horovod_runner.keras takes its place. To make this line "
            "go away: import horovod_runner.keras as hvd, and use its DistributedOptimizer"
        )


def patch_legacy(module: Any) -> None:
    """Make Horovod's functions use the Keras of its classes, ``tf.keras``, not ``keras``."""
    if not is_keras_3(module.__name__):
        module.K = module.keras.backend


def patch_tensorflow(hvd: Any) -> None:
    """Make functions accept Keras 3's variables and optimizers."""
    if is_keras_3(hvd.__name__):
        import_module(_TENSORFLOW).patch(hvd)  # it imports Keras


def patch_util(util: Any) -> None:
    """Keep AutoGraph off Horovod's functions: to translate them takes most of a first step.

    They were written for graphs without it, and have no conditions on tensors. Called with
    ``horovod.tensorflow.util``.
    """
    tf = util.tf
    util._make_subgraph = lambda function: tf.function(function, autograph=False)
    # For a tf.function of the user's. TensorFlow has such rules for Keras and other packages.
    with suppress(ImportError, AttributeError):
        config: Any = import_module("tensorflow.python.autograph.core.config")
        rules = map(config.DoNotConvert, ("horovod.tensorflow", _TENSORFLOW))
        config.CONVERSION_RULES = (*config.CONVERSION_RULES, *rules)


def patch_sync_batch_norm(module: Any) -> None:
    """Put a layer of Keras 3 in the place of one that was written for Keras 2."""
    if is_keras_3(module.__name__):
        batch_norm = import_module("horovod_runner.integrations.keras.distributed.batch_norm")
        module.SyncBatchNormalization = batch_norm.SyncBatchNormalization


def patch_elastic(elastic: Any) -> None:
    """Make ``TensorFlowKerasState`` accept models and optimizers of Keras 3."""
    if not is_keras_3(elastic.__name__):
        return

    def of_keras(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Not before it is used: it imports Keras.
            return getattr(import_module("horovod_runner.integrations.keras.elastic"), name)(
                *args, **kwargs
            )

        return call

    elastic.TensorFlowKerasState._save_model = of_keras("save_model")
    elastic.TensorFlowKerasState._load_model = of_keras("load_model")
    elastic._broadcast_model = of_keras("broadcast_model")
