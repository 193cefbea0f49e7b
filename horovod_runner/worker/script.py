"""A plain script, or a function of one, as the ``main`` of a run.

The text of the file is sent to the ranks, so executors need no copy. Modules beside the file are
found if the ranks see its folder; otherwise send them (``--ship-modules``, ``--py-files``).
"""

from __future__ import annotations

import linecache
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any


class Script:
    """Runs a file in a rank, as ``python FILE`` does, or calls one of its functions.

    Args:
        function: the name of a function in it, which is called without arguments; None runs the
            file as ``__main__``.
    """

    def __init__(self, path: Path, source: str, function: str | None = None) -> None:
        self._path = str(path)
        self._source = source
        self._function = function
        #: Its name in messages, as a function's.
        self.__qualname__ = path.name if function is None else f"{path.name}:{function}"

    def __call__(self) -> Any:
        """Run it; returns what the function returned."""
        module = self.define()
        return None if self._function is None else _call(module, self._function)

    def define(self) -> types.ModuleType:
        """Execute the file as a module, and return that.

        As ``__main__`` without a function; in a process that a rank starts, that module has
        another ``__name__``, as multiprocessing does it.
        """
        lines = self._source.splitlines(keepends=True)
        # For tracebacks on hosts that do not have the file.
        linecache.cache[self._path] = (len(self._source), None, lines, self._path)
        if self._function is None:
            module = sys.modules["__main__"]
        else:
            name = Path(self._path).stem
            module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = self._path
        # Not with the `from __future__` of this file.
        code = compile(self._source, self._path, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - the user's
        return module


class Imported:
    """Calls a function of a module that is imported in the rank, not on the driver."""

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function
        self.__qualname__ = f"{module}:{function}"

    def __call__(self) -> Any:
        """Call the function; returns its value."""
        return _call(import_module(self._module), self._function)


def _call(module: types.ModuleType, name: str) -> Any:
    function = getattr(module, name)
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(
            f"{module.__name__}:{name} is of type {kind}, and cannot be called: name a function"
        )
    return function()
