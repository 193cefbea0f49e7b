"""Collects no garbage while a framework is imported.

The objects that an import makes stay, and looking through them again and again takes an eighth of
its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from horovod_runner.worker.imports.finder import around_import

# Their imports make a hundred thousand objects and more.
_LARGE = (
    "keras",
    "lightning",
    "pytorch_lightning",
    "tensorflow",
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.trainer",
)


def keep_imports_uncollected() -> None:
    """Let Python collect no garbage during imports of frameworks, from now on."""
    for name in _LARGE:
        around_import(name, _uncollected)


@contextmanager
def _uncollected(module: ModuleType) -> Iterator[None]:
    """Let Python collect no garbage meanwhile, and never search what the first import has made.

    It would search that in each full collection, and twice when the rank ends: for 1 to 2 seconds.
    Later imports may come when there are a model and data, which are to be freed at some time.
    Keras mostly follows the import of its backend.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count() or module.__name__ == "keras":
                gc.freeze()
            gc.enable()
