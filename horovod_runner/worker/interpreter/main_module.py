"""The module ``__main__`` of a rank and of the processes that it starts.

Functions and classes of a notebook or script travel inside the pickle of main. They are put into a
``__main__`` of their own, where pickle finds them by their names.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_runner.worker.script import Script

#: The pickled functions and classes of __main__. Empty where main has not been loaded.
definitions: bytes | memoryview = b""


def make_main(name: str = "__main__") -> None:
    """Put an empty module in the place of ``__main__``; functions of it may bring another name."""
    main = types.ModuleType(name)
    sys.modules["__main__"] = main
    if name == "__mp_main__" or "__mp_main__" in sys.modules:  # multiprocessing's name for it
        sys.modules["__mp_main__"] = main


def main_globals() -> dict[str, Any]:
    """The globals of functions of ``__main__``, as their pickle asks for them."""
    return vars(sys.modules["__main__"])


def cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """A function with an empty ``functools.lru_cache``, in place of one of ``__main__``."""
    wrapped: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return wrapped


def load_call(data: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Load what ``run.pickling.pickle_call`` has pickled: main and its arguments.

    Keeps the first part for other processes.
    """
    global definitions  # noqa: PLW0603 - a process has one __main__
    file = io.BytesIO(data)
    unpickler = pickle.Unpickler(file)  # noqa: S301 - from our own driver
    load_definitions(unpickler)
    definitions = memoryview(data)[: file.tell()]  # they may be large
    call: tuple[Callable[..., Any], dict[str, Any]] = unpickler.load()
    return call


def load_definitions(unpickler: pickle.Unpickler) -> Script | None:
    """Load the first part into ``__main__``; returns main, if it is a script to be executed."""
    names, script = unpickler.load()
    main_globals().update(names)
    return script  # type: ignore[no-any-return]
