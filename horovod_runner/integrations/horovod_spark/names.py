"""Which module of this package replaces which module of ``horovod.spark``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from horovod_runner.worker.imports import replacements
from horovod_runner.worker.imports.replacements import ReplacementLoader

_HERE: Final = "horovod_runner.integrations.horovod_spark"
_MODULES: Final = {
    "horovod.spark": "launch",
    "horovod.spark.runner": "launch",
    "horovod.spark.common": "backend",
    "horovod.spark.common.backend": "backend",
    "horovod.spark.common.estimator": "estimator",
    "horovod.spark.common.params": "params",
    "horovod.spark.common.store": "store",
    "horovod.spark.common.util": "util",
    "horovod.spark.keras": "frameworks.keras",
    "horovod.spark.keras.estimator": "frameworks.keras",
    "horovod.spark.lightning": "frameworks.lightning",
    "horovod.spark.lightning.estimator": "frameworks.lightning",
    "horovod.spark.task": "util",
    "horovod.spark.task.task_info": "util",
    "horovod.spark.tensorflow": "frameworks",
    "horovod.spark.tensorflow.compute_worker": "frameworks.compute_worker",
    "horovod.spark.torch": "frameworks.torch",
    "horovod.spark.torch.estimator": "frameworks.torch",
}
_PACKAGES: Final = {name.rpartition(".")[0] for name in _MODULES}


def install() -> None:
    """Make ``import horovod.spark`` and its submodules return this package's modules.

    Call it before anything imports ``horovod.spark``. It applies to this process and to the ranks
    of its runs.
    """
    if _is_installed():
        return
    loaded = [name for name in list(sys.modules) if _is_ours(name)]
    if loaded:
        warnings.warn(
            f"{', '.join(loaded)} had been imported before horovod_runner.horovod_spark.install(): "
            "names that were taken from there stay Horovod's. Call install() first",
            stacklevel=2,
        )
    for name in loaded:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    replacements.note(_HERE)


def install_where_missing() -> None:
    """Do what :func:`install` did on the driver, in a rank."""
    if not _is_installed():
        sys.meta_path.insert(0, _Finder())


def _is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _is_ours(name: str) -> bool:
    return name == "horovod.spark" or name.startswith("horovod.spark.")


class _Finder:
    """An import finder for ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_ours(fullname):
            return None
        if fullname not in _MODULES:
            why = "is internal to Horovod's way of starting Spark tasks"
            if fullname.startswith("horovod.spark.data_loaders") or fullname.endswith("datamodule"):
                why = (
                    "reads rows with Petastorm, which this package's feed does. Leave out "
                    "data_module and the loader; with a reader of your own, train in a function, "
                    "HorovodRunner(np=4).run(train)"
                )
            raise ModuleNotFoundError(
                f"horovod_runner.horovod_spark has no module {fullname}: it {why}. The modules "
                f"that it has are {', '.join(_MODULES)}",
                name=fullname,
            )
        loader: Any = ReplacementLoader(f"{_HERE}.{_MODULES[fullname]}")
        return ModuleSpec(fullname, loader, is_package=fullname in _PACKAGES)
