"""Where a run's data lies on a host while it runs: a folder of the user's own, gone with the run.

    <temporary files>/horovod_runner-<user id>/<run id>/

Whoever uses it holds a lock on it, which the kernel drops with the process: the last one removes
it, and what a crash left behind is removed by the next run on this host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from horovod_runner.errors import DataError

VARIABLE = "HOROVOD_RUNNER_DATA"
_LOCK, _LIMIT = "in-use", "limit"
_RESERVE_BYTES = 1 << 30


class RunFolder:
    """A run's folder on this host; use it as a context, in as many processes as need it.

    Args:
        run_id: the run's.
        parent: where to make it, a folder that others may use; None for that of temporary files.
        limit: how many bytes it may take; None for all that are free but 1 GiB (or a twentieth of
            the disk, if that is less).
        lock: the descriptor of its lock, where this process has inherited it.

    Attributes:
        path: the folder; there from entering on.
    """

    def __init__(
        self,
        run_id: str,
        parent: Path | None = None,
        *,
        limit: int | None = None,
        lock: int | None = None,
    ) -> None:
        self._root = _root(parent or Path(tempfile.gettempdir()))
        self.path = self._root / run_id
        self._limit = limit
        self._lock = lock

    def __enter__(self) -> RunFolder:
        _make_own(self._root)
        sweep(self._root)
        while self._lock is None:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _lock(self.path, fcntl.LOCK_SH)
        if self._limit is not None:
            (self.path / _LIMIT).write_text(str(self._limit))
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # others use it still
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self.leave()
        with suppress(OSError):  # another run's folder is there
            self._root.rmdir()

    @property
    def lock(self) -> int:
        """The descriptor of its lock: a process that inherits that uses the folder as well."""
        assert self._lock is not None  # noqa: S101 - it was entered
        return self._lock

    def leave(self) -> None:
        """Use it no longer, but leave it: other processes have inherited the lock."""
        os.close(self.lock)


def remove_left(run_id: str) -> None:
    """Remove a run's folder on this host if all that used it were killed."""
    folder = RunFolder(run_id)
    if folder.path.is_dir():
        with folder:
            pass


def check_room(folder: Path, size: int) -> None:
    """See to it that a run's folder may take so many more bytes.

    Raises:
        DataError: it may not, or the disk has too little room.
    """
    path, disk = folder / _LIMIT, shutil.disk_usage(folder)
    takes = f"a dataset takes another {size / 1e6:.1f} MB in {folder}"
    if path.exists():
        limit, used = int(path.read_text()), _used(folder)
        if used + size > limit:
            raise DataError(
                f"{takes}, and the run may take {limit / 1e6:.1f} MB on a host, of which "
                f"{used / 1e6:.1f} MB are taken: raise data_limit, or ask for fewer columns"
            )
    room = disk.free - (0 if path.exists() else min(_RESERVE_BYTES, disk.total // 20))
    if size > room:
        raise DataError(
            f"{takes}, and {max(0, room) / 1e6:.1f} MB are free there: free space, or set TMPDIR "
            "to a folder on another disk (on the executors: spark.executorEnv.TMPDIR)"
        )


def _used(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


def sweep(root: Path) -> list[Path]:
    """Remove what crashed runs left behind; returns what that was."""
    removed = []
    for path in root.iterdir():
        with suppress(OSError):
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
                removed.append(path)
    return removed


def _lock(path: Path, kind: int) -> int | None:
    """Lock a folder; None if it was removed before that."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, kind)
        if os.fstat(descriptor).st_nlink:  # else it went while this waited
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _root(parent: Path) -> Path:
    return parent / f"horovod_runner-{os.getuid()}"


def _make_own(root: Path) -> None:
    """Make the user's folder; in a folder for all, somebody else may have made one of that name."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise DataError(f"no folder for the run's data could be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise DataError(
            f"{root} is not this user's alone: remove it, or set TMPDIR to another folder"
        )
