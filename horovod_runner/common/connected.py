"""Finds the library through which `main` has connected the ranks."""

from __future__ import annotations

import sys
from typing import Any, Literal

Library = Literal["horovod.torch", "horovod.tensorflow", "torch"]


def connected_library() -> tuple[Library, Any] | None:
    """The name and module of an initialized Horovod, or of torch for torch.distributed.

    None if the ranks are not connected yet. Imports nothing: only modules that are loaded count.
    """
    names: tuple[Library, ...] = ("horovod.torch", "horovod.tensorflow")
    for name in names:
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            return name, horovod
    torch = sys.modules.get("torch")
    distributed = None if torch is None else torch.distributed
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "torch", torch
    return None
