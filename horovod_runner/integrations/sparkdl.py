"""Lets code that imports Databricks' ``sparkdl`` run with this package instead.

    import horovod_runner.sparkdl

    horovod_runner.sparkdl.install()
    from sparkdl import HorovodRunner
    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.tensorflow.keras import LogCallback

``install()`` affects this process and the ranks of its runs. It never hides a real sparkdl.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from horovod_runner.worker.imports import replacements

_LOG = "horovod_runner.integrations.keras.reporting:LogCallback"
# The names in each module, and their homes in this package.
_MODULES = {
    "sparkdl": {"HorovodRunner": "horovod_runner:HorovodRunner"},
    "sparkdl.horovod": {"log_to_driver": "horovod_runner:log_to_driver"},
    "sparkdl.horovod.tensorflow": {},
    "sparkdl.horovod.tensorflow.keras": {"LogCallback": _LOG},
}


def install() -> None:
    """Make ``import sparkdl`` and its submodules return this package's names.

    Raises:
        ImportError: a real sparkdl is installed.
    """
    if is_installed():
        return
    real = _real()
    if real is not None:
        raise ImportError(
            f"a real sparkdl is installed ({real}), and install() does not hide it: uninstall it, "
            "or import HorovodRunner from horovod_runner"
        )
    _install()
    replacements.note(__name__)


def install_where_missing() -> None:
    """Do what :func:`install` did on the driver, in a rank; does nothing beside a real sparkdl."""
    if _real() is None:
        _install()


def is_installed() -> bool:
    """Whether ``sparkdl`` in this process is this package's."""
    return isinstance(sys.modules.get("sparkdl"), _Names)


class _Names(ModuleType):
    """A module that imports its names at first use."""

    def __getattr__(self, name: str) -> Any:
        home = _MODULES[self.__name__].get(name)
        if home is None:
            raise AttributeError(
                f"{self.__name__} of horovod_runner has no {name!r}; it has "
                f"{', '.join(_MODULES[self.__name__]) or 'only submodules'}"
            )
        module, _, attribute = home.partition(":")
        return getattr(import_module(module), attribute)


def _real() -> str | None:
    """Return the path of a real sparkdl; None if there is none."""
    if "sparkdl" in sys.modules:
        module = sys.modules["sparkdl"]
        return None if isinstance(module, _Names) else str(getattr(module, "__file__", module))
    from importlib import util  # at first use: every task imports this module

    spec = util.find_spec("sparkdl")
    return None if spec is None else str(spec.origin or list(spec.submodule_search_locations or ()))


def _install() -> None:
    for name in _MODULES:
        module = _Names(name, __doc__)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
