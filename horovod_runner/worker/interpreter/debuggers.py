"""What a debugger and getpass say in a rank, which has no terminal. Python's is `BdbQuit`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from horovod_runner.worker.imports.patches import instead_of
from horovod_runner.worker.interpreter.no_terminal import is_empty, refuse_input, where


def explain_getpass(getpass: ModuleType) -> None:
    """Replace ``getpass.getpass``, for an import hook."""

    @instead_of(getpass, "getpass")
    def ask(plain: Callable[..., str], *arguments: Any, **options: Any) -> str:
        if is_empty(sys.stdin):
            refuse_input("getpass()")
        return plain(*arguments, **options)


def explain_pdb(pdb: ModuleType) -> None:
    """Replace where pdb and debuggers on top of it ask for commands, for an import hook.

    Those that read from elsewhere, as from a socket, stay as they are.
    """

    @instead_of(pdb.Pdb, "set_trace")
    def set_trace(plain: Callable[..., None], self: Any, frame: Any = None, **options: Any) -> None:
        _refuse_without_terminal(self)
        plain(self, frame or sys._getframe(2), **options)  # the caller's, beyond `instead_of`

    @instead_of(pdb.Pdb, "interaction")
    def interaction(plain: Callable[..., None], self: Any, *arguments: Any) -> None:
        _refuse_without_terminal(self)
        plain(self, *arguments)


def _refuse_without_terminal(debugger: Any) -> None:
    if not is_empty(sys.stdin if debugger.use_rawinput else debugger.stdin):
        return
    raise RuntimeError(
        f"a debugger was started in {where()}, which has no terminal. To step through main, call "
        "it without HorovodRunner, main(...): Horovod then has one rank, this process. In a run, "
        "print(...) shows values and runner.dump_stacks() shows where each rank is. A debugger "
        "that listens on a port works too: env={'PYTHONBREAKPOINT': 'remote_pdb.set_trace'}"
    )
