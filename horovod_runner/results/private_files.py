"""The files of this user's runs. Only the user can read them: they show what a run printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from horovod_runner.errors import HorovodRunnerError

#: The advice when the folder's disk is full.
MORE_ROOM: Final = "Free space there, or set XDG_STATE_HOME to a folder on another disk."


def state_folder() -> Path:
    """``$XDG_STATE_HOME/horovod_runner`` or ~/.local/state/horovod_runner.

    Raises:
        HorovodRunnerError: this user has no home folder.
    """
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state, "horovod_runner")
    try:
        return Path.home() / ".local" / "state" / "horovod_runner"
    except RuntimeError as error:
        raise HorovodRunnerError(
            "runs are listed and recorded in the home folder, and this user has none: set "
            "XDG_STATE_HOME to another folder"
        ) from error


def private(name: str, flags: int) -> int:
    """An opener for ``open``: a new file is for this user alone."""
    return os.open(name, flags, 0o600)


@contextmanager
def replaced(path: Path, opener: Callable[[str, int], int] | None = private) -> Iterator[BinaryIO]:
    """Write a file that takes the place of an earlier one at once, when all is written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb", opener=opener) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
