"""The driver's stdout and stderr: writes to them, also when they are gone, and redirects them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, TextIO


def write(stream: Any, text: str) -> None:
    """Write a text and flush it. A stream that is closed, or None, is ignored.

    Characters that the stream's encoding lacks are escaped.
    """
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        return  # the terminal is gone or the stream is closed: the training must not end by that


def escape_unknown_characters() -> None:
    """Let ``print`` escape characters that the encoding of stdout and stderr lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def columns() -> int:
    """The width of the terminal at stderr; 0 if it is none, or one without a width."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns if is_terminal() else 0
    except (AttributeError, OSError, ValueError):
        return 0


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, which shows a bar although stderr is no terminal."""
    # Without it, the module is being imported by another thread, or stands in for IPython.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    return shell is not None and "IPKernelApp" in shell.config


def for_notices() -> TextIO:
    """Where the runner's own lines go: stderr, so that stdout holds only the program's output.

    Notebooks show stderr in red, as if something were wrong: there they go to stdout.
    """
    return sys.stdout if in_notebook() else sys.stderr


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Let what child processes such as Spark's Java print to stdout go to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
