"""Watches `os.environ`: which missing variables are read, and which are set. For warm starts.

An import reads variables only once. Modules that ``main`` imports after it has set variables must
therefore not be imported by a fork server, and variables that ``main`` sets in a forked worker come
too late.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection

#: The variables that were read while they were not set.
missed: set[str] = set()
# The variables when the watch began: some libraries clear os.environ for a while, and restore it.
_at_first: dict[str, str] = {}
_callbacks: list[Callable[[str], None]] = []


class _WatchedEnviron(os._Environ[str]):
    """The class of ``os.environ`` while it is watched."""

    def __getitem__(self, name: str) -> str:
        try:
            return super().__getitem__(name)
        except KeyError:
            missed.add(name)
            raise

    def __setitem__(self, name: str, value: str) -> None:
        before = super().__getitem__(name) if name in [*self] else None
        super().__setitem__(name, value)
        if value not in (before, _at_first.get(name)):
            for callback in _callbacks:
                callback(name)


def watch(callback: Callable[[str], None] | None = None) -> None:
    """Watch ``os.environ`` from here on.

    The callback gets the name of each variable that is set to a value which it did not have now.
    """
    _at_first.clear()
    _at_first.update(os.environ)
    os.environ.__class__ = _WatchedEnviron
    _callbacks[:] = [] if callback is None else [callback]


def importing(names: Collection[str]) -> bool:
    """Whether one of these modules is being imported right now."""
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):
            return True
    return False
