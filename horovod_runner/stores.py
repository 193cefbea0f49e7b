"""Folders that checkpoints are kept in: of the file system, or of a store that fsspec knows."""

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
# "s3://bucket", "dbfs:/x"; a drive's letter is none.
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):")


class Folder(Protocol):
    """Where checkpoints are kept.

    Attributes:
        url: as others may open it.
    """

    url: str

    def path_of(self, name: str) -> str:
        """The whole path or URL of a file in it."""

    def names(self) -> list[str]:
        """The files in it; none where there is no such folder."""

    def size(self, name: str) -> int | None:
        """A file's, in bytes; None where there is none."""

    def read(self, name: str) -> bytes:
        """A small file. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """A small file, whole or not at all."""

    def take(self, part: Path, name: str) -> None:
        """Take a local file in, whole or not at all; it is gone from where it was."""

    def local(self, name: str) -> Path | None:
        """The file's path if it is on this machine."""

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file here."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def age(self, name: str) -> float:
        """Seconds since a file was written; 0 where that is not known."""


class LocalFolder:
    """A folder of this machine, or one that several share."""

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
            self.take(part, name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def take(self, part: Path, name: str) -> None:
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        target = self.path / name
        try:
            part.replace(target)
        except OSError:  # from another disk
            between = self.path / f"{PART}{name}"
            shutil.move(part, between)
            between.replace(target)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the name, too, outlives a power cut
        except OSError:
            pass  # not every file system does that to a folder
        finally:
            os.close(descriptor)

    def local(self, name: str) -> Path | None:
        return self.path / name

    def fetch(self, name: str, path: Path) -> None:
        shutil.copyfile(self.path / name, path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def age(self, name: str) -> float:
        try:
            return max(0.0, time.time() - (self.path / name).stat().st_mtime)
        except OSError:
            return 0.0


class RemoteFolder:
    """A folder of a store that fsspec knows; what is put there is whole or not at all."""

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
            found = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

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

    def take(self, part: Path, name: str) -> None:
        self._files.makedirs(self._path, exist_ok=True)
        self._files.put_file(str(part), self._inside(name))
        part.unlink()

    def local(self, name: str) -> Path | None:
        return None

    def fetch(self, name: str, path: Path) -> None:
        self._files.get_file(self._inside(name), str(path))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._inside(name))

    def age(self, name: str) -> float:
        return 0.0


def open_folder(url: str) -> Folder:
    """The folder of a path or URL.

    Raises:
        CheckpointError: there is nothing that could read such an URL.
    """
    path = local_path(url)
    if path is not None:
        return LocalFolder(path)
    try:
        return RemoteFolder(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint_dir={url!r} cannot be used: {error}. Stores are reached through fsspec "
            "(pip install fsspec, and the package for this store: s3fs for s3://, gcsfs for gs://, "
            "adlfs for abfs://); a path without a scheme is a folder of the driver's machine."
        ) from error


def local_path(url: str) -> Path | None:
    """The path of a folder that is one of the file system's; None for a store's URL."""
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
