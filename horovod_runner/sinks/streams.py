"""Writes to the driver's stdout and stderr without failing when they are gone."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


def write(stream: Any, text: str) -> None:
    """Write a text and flush it. A closed stream is ignored."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return  # the terminal is gone or the stream is closed: the training must not end by that


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
    """Whether this is a Jupyter kernel: there tqdm draws with widgets, or as text without them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def for_notices() -> TextIO:
    """Where the runner's own lines go: stderr, so that stdout holds only the program's output.

    Notebooks show stderr in red, as if something were wrong: there they go to stdout.
    """
    return sys.stdout if in_notebook() else sys.stderr
