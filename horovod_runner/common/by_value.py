"""Pickles the code of chosen modules by value, for processes that lack these modules."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import cloudpickle

# Modules of torch that are of no plain type, which cloudpickle cannot pickle. It tries to where a
# notebook's class says ``torch`` and has an attribute of that name: ``self.classes``.
_ODD_MODULES: Final = ("torch.classes", "torch.ops")


@contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Make cloudpickle pickle the functions and classes of some modules by value."""
    for name in _ODD_MODULES:
        if name in sys.modules:
            copyreg.pickle(type(sys.modules[name]), _by_name)
    registered = cloudpickle.list_registry_pickle_by_value()
    shipped = [module for module in modules if module.__name__ not in registered]
    for module in shipped:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in shipped:
            cloudpickle.unregister_pickle_by_value(module)


def _by_name(module: Any) -> tuple[Any, tuple[str]]:
    return import_module, (module.__name__,)
