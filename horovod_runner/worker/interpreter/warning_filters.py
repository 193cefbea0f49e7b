"""Gives a rank the warning filters of the driver."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from horovod_runner.worker.imports.finder import when_imported

if TYPE_CHECKING:
    import re

#: Action, pattern of the message, "module:class" of the category, pattern of the module, line.
Filter = tuple[Any, str | None, str, str | None, int]


def taken() -> tuple[Filter, ...]:
    """The filters of this process, the first one to apply first."""
    return tuple(
        (
            action,
            _pattern(message),
            f"{category.__module__}:{category.__qualname__}",
            _pattern(module),
            line,
        )
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type)
    )


def _pattern(given: re.Pattern[str] | str | None) -> str | None:
    return given if given is None or isinstance(given, str) else given.pattern


def apply(filters: Sequence[Filter]) -> None:
    """Put the driver's filters before those of this process, which also end with Python's own."""
    pairs = zip(reversed(filters), reversed(taken()), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for each in reversed(filters[: len(filters) - same]):
        _add(each)


def _add(new: Filter) -> None:
    """Add a filter: at once, or when the module of its category has been imported."""
    module, _, name = new[2].partition(":")

    def add() -> None:
        action, message, _, where, line = new
        with suppress(Exception):  # another version of a library may lack the category
            category = getattr(sys.modules[module], name)
            warnings.filterwarnings(action, message or "", category, where or "", line)

    when_imported(module, add)
