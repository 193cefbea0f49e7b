"""Writes files that only this user can read: they show what a run printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def private(name: str, flags: int) -> int:
    """An opener for ``open``: a new file is for this user alone."""
    return os.open(name, flags, 0o600)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of an earlier one at once, when all is written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb", opener=private) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
