"""The operations of a folder of files, wherever it is; and which kind of folder a URL names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Protocol

PART: Final = ".part-"  # the start of an unfinished file's name
# "s3://bucket", "dbfs:/x", "simplecache::s3://bucket", but not the letter of a drive, and not a
# folder named after the time, "run-2026-01-31T08:15".
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?=[/:])")


class Folder(Protocol):
    """A folder of files, local or remote.

    All methods raise OSError where the folder cannot be reached, or refuses.

    Attributes:
        url: its path or URL, for :func:`~horovod_runner.host.folders.opening.open_folder` in
            another process.
    """

    url: str

    def path_of(self, name: str) -> str:
        """The full path or URL of a file."""

    def names(self) -> list[str]:
        """The names of all files; empty if the folder does not exist."""

    def size(self, name: str) -> int | None:
        """A file's size in bytes; None if it does not exist."""

    def read(self, name: str) -> bytes:
        """Read a small file. Raises FileNotFoundError."""

    def read_range(self, name: str, at: int, count: int) -> bytes:
        """Read some bytes of a file from a position on. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""

    def move_in(self, part: Path, name: str) -> None:
        """Move a local file into the folder, atomically."""

    def local(self, name: str) -> Path | None:
        """The file's path in this machine's file system; None for a URL."""

    def copy_out(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises FileNotFoundError."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def age(self, name: str) -> float:
        """Seconds since a file was written; 0 if that is not known."""

    def inside(self, name: str) -> Folder:
        """A folder in this one; it need not exist."""

    def remove_inside(self, name: str) -> None:
        """Remove a folder in this one with its files, if it exists."""


def local_path(url: str) -> Path | None:
    """The path of a folder in the file system; None for a URL that needs fsspec."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url)
    rest = url[scheme.end() :]
    if scheme["scheme"] == "file":
        return Path("/" + rest.lstrip("/"))
    mounted = Path("/dbfs")
    if scheme["scheme"] == "dbfs" and mounted.is_dir():
        return mounted / rest.lstrip("/")
    return None


def is_elsewhere(url: str) -> bool:
    """Whether a folder does not depend on this process: a URL, or an absolute path."""
    path = local_path(url)
    return path is None or path.is_absolute()
