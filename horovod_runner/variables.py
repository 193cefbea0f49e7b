"""Who asks for which environment variables, and who sets them: a warm start depends on it.

What an import reads of the environment is read once. So what a main imports after it has set
variables is not for a fork server, and a main that sets them in a forked worker comes too late.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection

#: What has been asked for and is not there.
missed: set[str] = set()
_set: list[Callable[[str], None]] = []


class _Watched(os._Environ[str]):
    """``os.environ``."""

    def __getitem__(self, name: str) -> str:
        try:
            return super().__getitem__(name)
        except KeyError:
            missed.add(name)
            raise

    def __setitem__(self, name: str, value: str) -> None:
        before = super().__getitem__(name) if name in [*self] else None
        super().__setitem__(name, value)
        if value != before:
            for tell in _set:
                tell(name)


def watch(tell: Callable[[str], None] | None = None) -> None:
    """Watch over ``os.environ`` from here on.

    Args:
        tell: called with the name of each variable that is given another value.
    """
    os.environ.__class__ = _Watched
    _set[:] = [] if tell is None else [tell]


def importing(names: Collection[str]) -> bool:
    """Whether one of these modules is just being imported."""
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):
            return True
    return False
