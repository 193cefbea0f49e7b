"""A folder at a URL, through fsspec, whose packages repeat what a store refuses for being busy."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from horovod_runner.common.text import without_password
from horovod_runner.host.folders import hdfs
from horovod_runner.host.folders.urls import file_system

_T = TypeVar("_T")


class RemoteFolder:
    """A folder at a URL. Object stores write files atomically, and so does this class on HDFS.

    Raises:
        ImportError: fsspec, or its package for such a URL, is not installed.
        ValueError: fsspec knows no such URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._hdfs = hdfs.is_hdfs(self.url)
        self._options = hdfs.FEW_ATTEMPTS if self._hdfs else {}
        self._files, self._path = file_system(self.url, **self._options)

    def path_of(self, name: str) -> str:
        """See :class:`~horovod_runner.host.folders.folder.Folder`; so for all below."""
        return f"{self.url}/{name}"

    def _inside(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _try(self, action: Callable[[Any], _T]) -> _T:
        """Act on the file system; where access is refused, once more with the latest credentials.

        fsspec keeps a connection, with the credentials that it once read.
        """
        try:
            return self._act(action)
        except PermissionError:
            self._files, self._path = file_system(
                self.url, skip_instance_cache=True, **self._options
            )
            return self._act(action)

    def _act(self, action: Callable[[Any], _T]) -> _T:
        return hdfs.repeat(partial(action, self._files)) if self._hdfs else action(self._files)

    def names(self) -> list[str]:
        def names(files: Any) -> list[str]:
            files.invalidate_cache()
            return [str(path) for path in files.ls(self._path, detail=False)]

        try:
            paths = self._try(names)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def size(self, name: str) -> int | None:
        try:
            return self._try(lambda files: int(files.size(self._inside(name))))
        except (FileNotFoundError, TypeError):
            return None

    def read(self, name: str) -> bytes:
        return self._try(lambda files: bytes(files.cat_file(self._inside(name))))

    def read_range(self, name: str, at: int, count: int) -> bytes:
        def read(files: Any) -> bytes:
            return bytes(files.cat_file(self._inside(name), start=at, end=at + count))

        return self._try(read)

    def write(self, name: str, data: bytes) -> None:
        def write(files: Any) -> None:
            files.makedirs(self._path, exist_ok=True)
            if self._hdfs:
                hdfs.write(files, self._inside(name), io.BytesIO(data))
            else:
                files.pipe_file(self._inside(name), data)

        self._try(write)

    def move_in(self, part: Path, name: str) -> None:
        def put(files: Any) -> None:
            files.makedirs(self._path, exist_ok=True)
            if self._hdfs:
                with part.open("rb") as file:
                    hdfs.write(files, self._inside(name), file)
            else:
                files.put_file(str(part), self._inside(name))
            files.invalidate_cache()

        self._try(put)
        sent, there = part.stat().st_size, self.size(name)
        if there != sent:
            where = without_password(self.path_of(name))
            raise OSError(f"{there or 0} of {sent} bytes arrived at {where}")
        part.unlink()

    def local(self, name: str) -> Path | None:
        return None

    def copy_out(self, name: str, path: Path) -> None:
        self._try(lambda files: files.get_file(self._inside(name), str(path)))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._try(lambda files: files.rm_file(self._inside(name)))

    def age(self, name: str) -> float:
        return 0.0

    def inside(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.path_of(name))

    def remove_inside(self, name: str) -> None:
        def remove(files: Any) -> None:
            files.invalidate_cache()
            files.rm(self._inside(name), recursive=True)

        with suppress(FileNotFoundError):
            self._try(remove)
