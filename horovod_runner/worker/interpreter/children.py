"""Processes that `multiprocessing` starts anew in a rank ("spawn", "forkserver").

Python has them run the user's script again, which may not exist on this host, or start a run of its
own. They get the definitions of the rank's ``__main__`` instead, and its logging and warnings. A
process that is forked has them anyway.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

from horovod_runner.worker.imports.patches import instead_of
from horovod_runner.worker.interpreter import main_module, settings


def give_to_children(spawn: types.ModuleType) -> None:
    """Have new processes get the definitions of ``__main__``, for an import hook.

    ``spawn`` is ``multiprocessing.spawn``, or that of its fork `multiprocess`.
    """

    @instead_of(spawn, "get_preparation_data")
    def get_preparation_data(plain: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
        preparation = plain(name)
        if not main_module.definitions:
            return preparation
        # Python would run the user's script once more, on hosts that have it.
        preparation.pop("init_main_from_path", None)
        return _Preparation(preparation, spawn.__name__)


class _Preparation(dict[str, Any]):
    def __init__(self, preparation: dict[str, Any], spawn: str) -> None:
        super().__init__(preparation)
        self._spawn = spawn

    def __reduce__(self) -> tuple[Any, ...]:
        definitions = bytes(main_module.definitions)
        return _prepare, (self._spawn, dict(self), definitions, settings.applied)


def _prepare(
    module: str,
    preparation: dict[str, Any],
    definitions: bytes,
    set_up: tuple[Any, Any],
) -> dict[str, Any]:
    """Prepare a new process; returns what is left to do for multiprocessing: nothing."""
    spawn = import_module(module)
    spawn.prepare(preparation)  # sys.path first: the definitions import modules
    main_module.definitions = definitions
    settings.apply(*set_up)
    give_to_children(spawn)  # for processes that this one starts
    main_module.make_main("__mp_main__")
    unpickler = pickle.Unpickler(io.BytesIO(definitions))  # noqa: S301 - from the rank
    script = main_module.load_definitions(unpickler)
    if script is not None:
        script.define()
    return {}
