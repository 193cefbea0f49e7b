"""The names of sparkdl, where Databricks' HorovodRunner was, for code that still imports them.

    import horovod_runner.sparkdl

    horovod_runner.sparkdl.install()
    from sparkdl import HorovodRunner
    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.tensorflow.keras import LogCallback

It holds for this process, and for the ranks of the runs that it starts. A real sparkdl is never
hidden.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LOG = "horovod_runner.keras.reporting:LogCallback"
# Each module's names, and where they are here.
_MODULES = {
    "sparkdl": {"HorovodRunner": "horovod_runner:HorovodRunner"},
    "sparkdl.horovod": {"log_to_driver": "horovod_runner:log_to_driver"},
    "sparkdl.horovod.tensorflow": {},
    "sparkdl.horovod.tensorflow.keras": {"LogCallback": _LOG},
}


def install() -> None:
    """Make ``import sparkdl`` and its modules give this package's names.

    Raises:
        ImportError: there is a real sparkdl, and it is not to be hidden.
    """
    if is_installed():
        return
    found = _real()
    if found is not None:
        raise ImportError(
            f"there is a real sparkdl here ({found}), and its names are not to be hidden: "
            "uninstall it, or import HorovodRunner from horovod_runner"
        )
    _install()


def install_where_missing() -> None:
    """For a rank whose driver has called :func:`install`: nothing, where there is a real one."""
    if _real() is None:
        _install()


def is_installed() -> bool:
    """Whether ``sparkdl`` is this package's, here."""
    return isinstance(sys.modules.get("sparkdl"), _Names)


class _Names(ModuleType):
    """A module that finds its names when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        home = _MODULES[self.__name__].get(name)
        if home is None:
            raise AttributeError(
                f"{self.__name__} of horovod_runner has no {name!r}; it has "
                f"{', '.join(_MODULES[self.__name__]) or 'modules alone'}"
            )
        module, _, attribute = home.partition(":")
        return getattr(import_module(module), attribute)


def _real() -> str | None:
    """Where a real sparkdl is."""
    if "sparkdl" in sys.modules:
        module = sys.modules["sparkdl"]
        return None if isinstance(module, _Names) else str(getattr(module, "__file__", module))
    from importlib import util  # here: every task imports this module

    spec = util.find_spec("sparkdl")
    return None if spec is None else str(spec.origin or list(spec.submodule_search_locations or ()))


def _install() -> None:
    for name in _MODULES:
        module = _Names(name, __doc__)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
