"""Runs code before and after Python executes a module that is imported.

Not wrapt's ``register_post_import_hook``: an import of wrapt takes a quarter of a rank's start,
its hooks see no failed import, and they run for the first import only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader

Around = Callable[[ModuleType], AbstractContextManager[None]]
_around: dict[str, list[Around]] = {}


def around_import(name: str, around: Around) -> None:
    """Execute a module inside a context manager, whenever it is imported from now on.

    ``around`` gets the module, which is still empty. Those of one module are entered in the order
    in which they came.
    """
    managers = _around.setdefault(name, [])
    if around not in managers:
        managers.append(around)
    if not any(isinstance(finder, _AroundFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AroundFinder())


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call a function when a module has been imported: now if it is already."""

    @contextmanager
    def around(_: ModuleType) -> Iterator[None]:
        yield
        call()

    if name in sys.modules:
        call()
    else:
        around_import(name, around)


class _AroundFinder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _around:
            return None
        for finder in sys.meta_path:
            if not isinstance(finder, _AroundFinder):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _AroundLoader(spec.loader)  # type: ignore[assignment]
                    return spec
        return None


class _AroundLoader:
    """Loads a module with its own loader, inside the module's context managers.

    Args:
        loader: the module's own. One that reads a zip file is that of other modules, too.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # what a reader of a spec may ask of its loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with ExitStack() as stack:
            for around in _around[module.__name__]:
                stack.enter_context(around(module))
            self._loader.exec_module(module)
