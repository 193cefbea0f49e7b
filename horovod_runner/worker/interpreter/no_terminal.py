"""A rank reads from /dev/null: `input` says so. Python's error is "EOF when reading a line"."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from horovod_runner.worker import context
from horovod_runner.worker.imports.patches import instead_of


def explain_input() -> None:
    """Replace ``input`` in this process."""

    @instead_of(builtins, "input")
    def input(plain: Callable[..., str], *arguments: object) -> str:
        if is_empty(sys.stdin):
            refuse_input("input()")
        return plain(*arguments)


def is_empty(stream: Any) -> bool:
    """Whether a stream is /dev/null."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    except (AttributeError, OSError, ValueError):  # closed, or in memory
        return stream is None


def refuse_input(call: str) -> NoReturn:
    """Raise the error of a call that asks for input, ``EOFError`` as without our words."""
    raise EOFError(
        f"{call} was called in {where()}, which has no terminal. Ask before run, and pass the "
        "answer as an argument: run(main, name=answer)"
    )


def where() -> str:
    """This process, in words."""
    rank = context.current()
    if rank is None:
        return "a process of a rank"
    return f"rank {rank.rank} of {rank.size} (process {os.getpid()} on {os.uname().nodename})"
