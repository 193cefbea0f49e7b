"""A file system on /dev/fuse with the rules of Unity Catalog Volumes, or of NFS.

    python -m tests.stores.volume BACKING MOUNTPOINT [--no-rename | --cached SECONDS]

Files are written from their start to their end. There is no random write, no append, no truncation
but to nothing, no link, no allocation (EOPNOTSUPP), and no change of modes or times (EPERM). All
files belong to nobody, and everyone may do everything. Files cannot be mapped into memory. A file
`fail-<errno>` in BACKING makes the next close fail with that error, after half of the file has
arrived.

With ``--no-rename`` it is like Mountpoint for S3. With ``--cached`` it has NFS's rules instead:
everything can be written, and for so long the kernel believes what it knows about names, sizes and
missing files. A file of another machine fails once with ESTALE.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import mfusepy
from mfusepy import FuseOSError


class Files(mfusepy.Operations):  # type: ignore[misc]
    """Passes everything on to a folder of this machine."""

    use_ns = True

    def init(self, path: str) -> None:
        """Called once it is mounted."""
        print("ready", flush=True)

    def __init__(self, backing: str) -> None:
        self._backing = Path(backing)

    def _path(self, path: str) -> Path:
        return self._backing / path.lstrip("/")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = self._path(path).lstat()
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        times = {f"st_{which}time": getattr(found, f"st_{which}time_ns") for which in "amc"}
        return {**{name: getattr(found, name) for name in names}, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._path(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._path(path))
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")
        return {name: getattr(found, name) for name in names}

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._path(path), length)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._path(path), ns=times)

    def flush(self, path: str, fh: int) -> None:
        """Called by each close."""

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


class Volume(Files):
    """Files are written from their start to their end, once."""

    def __init__(self, backing: str) -> None:
        super().__init__(backing)
        self._written: dict[int, int] = {}  # by handle, how many bytes; -1 once it has arrived

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = super().getattr(path, fh)
        return {**found, "st_mode": found["st_mode"] | 0o777, "st_uid": 65534, "st_gid": 65534}

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_APPEND:
            raise FuseOSError(errno.EOPNOTSUPP)
        fh = super().open(path, flags)
        if flags & os.O_ACCMODE and not os.fstat(fh).st_size:
            self._written[fh] = 0
        return fh

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        fh = super().create(path, mode)
        self._written[fh] = 0
        return fh

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if self._written.get(fh) != offset:
            raise FuseOSError(errno.EOPNOTSUPP)
        self._written[fh] += len(data)
        return super().write(path, data, offset, fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        if length:
            raise FuseOSError(errno.EOPNOTSUPP)
        super().truncate(path, length, fh)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        raise FuseOSError(errno.EPERM)

    def chmod(self, path: str, mode: int) -> None:
        raise FuseOSError(errno.EPERM)

    def chown(self, path: str, uid: int, gid: int) -> None:
        raise FuseOSError(errno.EPERM)

    def link(self, target: str, source: str) -> None:
        raise FuseOSError(errno.EOPNOTSUPP)

    def symlink(self, target: str, source: str) -> None:
        raise FuseOSError(errno.EOPNOTSUPP)

    def flush(self, path: str, fh: int) -> None:
        for failure in self._backing.glob("fail-*") if self._written.get(fh) else ():
            failure.unlink()
            os.truncate(fh, self._written[fh] // 2)
            raise FuseOSError(int(failure.name.removeprefix("fail-")))

    def release(self, path: str, fh: int) -> None:
        self._written.pop(fh, None)
        super().release(path, fh)


class Cached(Files):
    """What another machine changes is seen late, and may be gone when it is read."""

    def __init__(self, backing: str) -> None:
        super().__init__(backing)
        self._known: set[str] = set()  # files that this machine wrote, or has failed to read once

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._known.add(path)
        return super().create(path, mode)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._known.add(new)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if path not in self._known:
            self._known.add(path)
            raise FuseOSError(errno.ESTALE)
        return super().read(path, size, offset, fh)


class Mountpoint(Volume):
    """Files keep their names."""

    def rename(self, old: str, new: str) -> None:
        raise FuseOSError(errno.ENOSYS)


def main() -> None:
    backing, mountpoint, *rest = sys.argv[1:]
    options: dict[str, Any] = {"direct_io": True}  # otherwise the kernel reads again by itself
    files: Files = Volume(backing)
    if rest[:1] == ["--no-rename"]:
        files = Mountpoint(backing)
    elif rest[:1] == ["--cached"]:
        files = Cached(backing)
        names = ("attr_timeout", "entry_timeout", "negative_timeout")
        options.update(dict.fromkeys(names, int(rest[1])))
    mfusepy.FUSE(
        files,
        mountpoint,
        foreground=True,
        nothreads=True,
        allow_other=True,
        fsname="volume",
        **options,
    )


if __name__ == "__main__":
    main()
