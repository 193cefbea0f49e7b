"""Pickles the code of chosen modules by value, for processes that lack these modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import cloudpickle


@contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Make cloudpickle pickle the functions and classes of some modules by value."""
    registered = cloudpickle.list_registry_pickle_by_value()
    shipped = [module for module in modules if module.__name__ not in registered]
    for module in shipped:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in shipped:
            cloudpickle.unregister_pickle_by_value(module)
