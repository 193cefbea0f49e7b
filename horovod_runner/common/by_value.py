"""Pickles for other processes: the code of modules that these lack, and what torch refuses."""

from __future__ import annotations

import copyreg
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import cloudpickle

# Modules of torch that are of no plain type, which cloudpickle cannot pickle. It tries to where a
# notebook's class says ``torch`` and has an attribute of that name: ``self.classes``.
_ODD_MODULES: Final = ("torch.classes", "torch.ops")

# How many runs that begin now ship a module, by its name: cloudpickle has one list for all threads.
_uses: Counter[str] = Counter()
_uses_lock: Final = threading.Lock()


@contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Make cloudpickle pickle the functions and classes of some modules by value.

    Also modules of torch with parametrizations, such as weight_norm, which torch refuses to pickle.
    """
    for kind in _parametrized():
        copyreg.pickle(kind, _with_parametrizations)
    for name in _ODD_MODULES:
        if name in sys.modules:
            copyreg.pickle(type(sys.modules[name]), _by_name)
    shipped: list[ModuleType] = []
    try:
        with _uses_lock:
            of_user = {*cloudpickle.list_registry_pickle_by_value()} - {*_uses}
            for module in modules:
                if module.__name__ not in of_user:
                    cloudpickle.register_pickle_by_value(module)
                    _uses[module.__name__] += 1
                    shipped.append(module)
        yield
    finally:
        with _uses_lock:
            for module in shipped:
                _uses[module.__name__] -= 1
                if not _uses[module.__name__]:
                    del _uses[module.__name__]
                    cloudpickle.unregister_pickle_by_value(module)


def _by_name(module: Any) -> tuple[Any, tuple[str]]:
    return import_module, (module.__name__,)


def _parametrized() -> Iterator[Any]:
    """The classes that torch has made for modules with parametrizations."""
    if "torch.nn.utils.parametrize" not in sys.modules:
        return
    waiting = [sys.modules["torch.nn"].Module]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        refuses = vars(kind).get("__getstate__")
        if getattr(refuses, "__module__", "") == "torch.nn.utils.parametrize":
            yield kind


def _with_parametrizations(module: Any) -> tuple[Any, ...]:
    from torch.nn.utils.parametrize import type_before_parametrizations

    made_of = type_before_parametrizations(module), [*module.parametrizations]
    return _parametrize, made_of, vars(module)


def _parametrize(kind: Any, names: list[str]) -> Any:
    """A module as torch makes it for parametrizations of these names, without its state."""
    from torch.nn import Module
    from torch.nn.utils import parametrize

    module = kind.__new__(kind)
    Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module
