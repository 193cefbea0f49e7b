"""Makes temporary files without a name."""

from __future__ import annotations

import tempfile
from typing import IO


def unnamed_file(purpose: str, *, buffering: int = -1) -> IO[bytes]:
    """Open a temporary file without a name: only this process and its children can reach it.

    It is removed when the last descriptor of it is closed, also after a crash.

    Args:
        purpose: a word for people who list open files.
        buffering: as in :func:`open`; 0 writes each call through.

    Raises:
        OSError: the folder for temporary files is full or missing.
    """
    return tempfile.TemporaryFile(prefix=f"horovod_runner-{purpose}-", buffering=buffering)
