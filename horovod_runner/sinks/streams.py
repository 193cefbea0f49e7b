"""Writes to the driver's stdout and stderr without failing when they are gone."""

from __future__ import annotations

import sys
from typing import Any


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
