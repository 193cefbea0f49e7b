"""A folder in the file system: a disk, NFS, or a store that is mounted.

Mounted stores (Unity Catalog Volumes, DBFS, Mountpoint for S3) know no random write, no append and
no link; some know no rename. NFS answers ESTALE for a file that another host has replaced.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar
from uuid import uuid4

from horovod_runner.host.folders.folder import PART

_T = TypeVar("_T")
_UNKNOWN: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF})


class LocalFolder:
    """A folder in the file system: of this machine, or shared by several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def path_of(self, name: str) -> str:
        """See :class:`~horovod_runner.host.folders.folder.Folder`; so for all below."""
        return str(self.path / name)

    def names(self) -> list[str]:
        try:
            return fresh(lambda: os.listdir(self.path))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        try:
            return fresh(lambda: (self.path / name).stat().st_size)
        except OSError:  # for example, no permission to look there
            return None

    def read(self, name: str) -> bytes:
        return fresh((self.path / name).read_bytes)

    def read_range(self, name: str, at: int, count: int) -> bytes:
        def read() -> bytes:
            with (self.path / name).open("rb") as file:
                file.seek(at)
                return file.read(count)

        return fresh(read)

    def write(self, name: str, data: bytes) -> None:
        part = self.path / f"{PART}{uuid4().hex[:8]}-{name}"  # two may write the same file
        try:
            part.write_bytes(data)
            self.move_in(part, name)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def move_in(self, part: Path, name: str) -> None:
        _sync(part)
        try:
            part.replace(self.path / name)
        except OSError as error:
            # Another disk; or a store without rename, where a file appears as a whole anyway.
            if error.errno != errno.EXDEV and error.errno not in _UNKNOWN:
                raise
            renames = error.errno == errno.EXDEV and part.parent != self.path
            self._copy_in(part, name, renames=renames)
        with suppress(OSError):  # not every file system can sync a folder
            _sync(self.path)  # so that the file's name survives a power cut, too

    def _copy_in(self, part: Path, name: str, *, renames: bool) -> None:
        target = self.path / (f"{PART}{name}" if renames else name)
        try:
            shutil.copyfile(part, target)  # and not its mode and times, which a store may refuse
            _sync(target)
            if renames:
                target.replace(self.path / name)
        except BaseException:
            with suppress(OSError):
                target.unlink(missing_ok=True)
            raise
        part.unlink()

    def local(self, name: str) -> Path | None:
        return self.path / name

    def copy_out(self, name: str, path: Path) -> None:
        fresh(lambda: shutil.copyfile(self.path / name, path))

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def age(self, name: str) -> float:
        try:
            return max(0.0, time.time() - (self.path / name).stat().st_mtime)
        except OSError:
            return 0.0

    def inside(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def remove_inside(self, name: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.path / name)


def fresh(read: Callable[[], _T]) -> _T:
    """Read; again if this host knew a file that another host has replaced.

    Raises:
        FileNotFoundError: the file is gone.
    """
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        raise FileNotFoundError(errno.ENOENT, "another host has removed it") from error


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    finally:
        os.close(descriptor)
