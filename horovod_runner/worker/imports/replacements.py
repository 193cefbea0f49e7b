"""Our modules that replace other packages: which are installed, here and on the ranks.

A module that replaces a package has ``install()`` for users, and ``install_where_missing()``
for the ranks of a driver where the user called it.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_installed: dict[str, None] = {}  # in order


def note(module: str) -> None:
    """Remember that a module of ours replaces another package in this process."""
    _installed[module] = None


def installed() -> tuple[str, ...]:
    """The modules that replace other packages in this process."""
    return tuple(_installed)


def install_where_missing(modules: Iterable[str]) -> None:
    """Do on a rank what the user did on the driver."""
    for module in modules:
        import_module(module).install_where_missing()


class ReplacementLoader:
    """Loads a module that has the contents of another module."""

    def __init__(self, replacement: str) -> None:
        self._replacement = replacement

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Part of Python's protocol of loaders, as the next method: an ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give a new module the names of the other one."""
        replacement = import_module(self._replacement)
        module.__doc__ = replacement.__doc__
        module.__getattr__ = lambda name: getattr(replacement, name)  # type: ignore[method-assign]
        module.__dir__ = lambda: dir(replacement)  # type: ignore[method-assign]
        module.__all__ = list(dir(replacement))  # type: ignore[attr-defined]
