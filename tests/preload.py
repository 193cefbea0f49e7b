"""Ranks that are forked with the frameworks of a program, where a cold start is not the subject."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from itertools import chain

# What a program imports, by what it says.
_FRAMEWORKS = {
    r"\btorch\b": ("horovod.torch",),
    r"import (keras|tensorflow)|\.keras\b": ("keras", "horovod.tensorflow"),
    r"from transformers": ("horovod.torch", "transformers.trainer"),
}


def frameworks_of(code: str) -> tuple[str, ...]:
    """The frameworks that a program imports."""
    wanted = [names for said, names in _FRAMEWORKS.items() if re.search(said, code)]
    return tuple(dict.fromkeys(chain.from_iterable(wanted)))


def preload(frameworks: Iterable[str]) -> None:
    """From now on, fork the ranks of this process's runs from one that has imported them."""
    from horovod_runner import ClusterConfig

    defaults = inspect.unwrap(ClusterConfig.__init__).__kwdefaults__
    defaults["preload_frameworks"] = tuple(frameworks)
