"""Files without a name, and digests of files."""

from __future__ import annotations

import tempfile
from pathlib import Path
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


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    import hashlib  # here: every rank imports this module

    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
