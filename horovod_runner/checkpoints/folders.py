"""The folders that checkpoints are kept in: paths of a file system, or URLs through fsspec."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from horovod_runner.errors import CheckpointError

PART: Final = ".part-"
# "s3://bucket", "dbfs:/x", but not the letter of a drive.
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):")


class Folder(Protocol):
    """A folder of files, local or remote.

    Attributes:
        url: its path or URL, for :func:`open_folder` in another process.
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


class LocalFolder:
    """A folder in the file system: of this machine, or shared by several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def path_of(self, name: str) -> str:
        """See :class:`Folder`; so for all below."""
        return str(self.path / name)

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except OSError:
            return None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        part = self.path / f"{PART}{name}"
        try:
            part.write_bytes(data)
            self.move_in(part, name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def move_in(self, part: Path, name: str) -> None:
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        target = self.path / name
        try:
            part.replace(target)
        except OSError:  # it is on another disk
            copied = self.path / f"{PART}{name}"
            shutil.move(part, copied)
            copied.replace(target)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # so that the file's name survives a power cut, too
        except OSError:
            pass  # not every file system can sync a folder
        finally:
            os.close(descriptor)

    def local(self, name: str) -> Path | None:
        return self.path / name

    def copy_out(self, name: str, path: Path) -> None:
        shutil.copyfile(self.path / name, path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def age(self, name: str) -> float:
        try:
            return max(0.0, time.time() - (self.path / name).stat().st_mtime)
        except OSError:
            return 0.0


class RemoteFolder:
    """A folder at a URL, through fsspec. Object stores write files atomically."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        self._files, self._path = fsspec.core.url_to_fs(self.url)

    def path_of(self, name: str) -> str:
        """See :class:`Folder`; so for all below."""
        return f"{self.url}/{name}"

    def _inside(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def size(self, name: str) -> int | None:
        try:
            return int(self._files.size(self._inside(name)))
        except (FileNotFoundError, TypeError):
            return None

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(self._inside(name)))

    def write(self, name: str, data: bytes) -> None:
        self._files.makedirs(self._path, exist_ok=True)
        with self._files.open(self._inside(name), "wb") as file:
            file.write(data)

    def move_in(self, part: Path, name: str) -> None:
        self._files.makedirs(self._path, exist_ok=True)
        self._files.put_file(str(part), self._inside(name))
        part.unlink()

    def local(self, name: str) -> Path | None:
        return None

    def copy_out(self, name: str, path: Path) -> None:
        self._files.get_file(self._inside(name), str(path))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._inside(name))

    def age(self, name: str) -> float:
        return 0.0


def open_folder(url: str) -> Folder:
    """Open the folder of a path or URL. Does not create it.

    Raises:
        CheckpointError: fsspec, or its package for such a URL, is not installed.
    """
    path = local_path(url)
    if path is not None:
        return LocalFolder(path)
    try:
        return RemoteFolder(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint_dir={url!r} cannot be used: {error}. URLs are opened through fsspec: pip "
            "install fsspec, and its package for the scheme (s3fs for s3://, gcsfs for gs://, "
            "adlfs for abfs://). A path without a scheme is a folder of the driver's machine."
        ) from error


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
