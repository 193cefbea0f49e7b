"""Modules of the package as the tests of callbacks need them."""

from __future__ import annotations

import importlib.util
from types import ModuleType


def load_anew(name: str) -> ModuleType:
    """Run a module once more, as an object of its own: ``sys.modules`` keeps the usual one."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
