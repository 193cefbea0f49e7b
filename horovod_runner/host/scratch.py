"""A run's scratch folder on a host: private to the user, and removed at the end of the run.

    <temporary files>/horovod_runner-<user id>/<run id>/

Every process that uses the folder holds a shared lock on it, which the kernel releases with the
process. The last process removes the folder. After a crash the next run on this host removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from horovod_runner.common.files import temporary_files, write_problem
from horovod_runner.common.text import sizes_text
from horovod_runner.errors import DataError

VARIABLE = "HOROVOD_RUNNER_DATA"
TEMPORARY_VARIABLE = "HOROVOD_RUNNER_TEMPORARY"
_LOCK, _LIMIT = "in-use", "limit"
_RESERVE_BYTES = 1 << 30
# Runs that begin and end at the same moment disturb each other once or twice.
_TRIES = 10


class RunFolder:
    """A run's folder on this host: a context manager, usable in several processes at once.

    Args:
        parent: the folder to create it in, which other users may share; None for the folder of
            temporary files.
        limit: how many bytes it may hold; None for all free space except 1 GiB (or a twentieth of
            the disk, if that is less).
        lock: the descriptor of its lock, if this process has inherited it.

    Attributes:
        path: the folder; it exists inside the context.
    """

    def __init__(
        self,
        run_id: str,
        parent: Path | None = None,
        *,
        limit: int | None = None,
        lock: int | None = None,
    ) -> None:
        self._root = _root(parent or _temporary_files())
        self.path = self._root / run_id
        self._limit = limit
        self._lock = lock

    def __enter__(self) -> RunFolder:
        try:
            self._create()
            if self._limit is not None:
                (self.path / _LIMIT).write_text(str(self._limit))
        except OSError as error:
            if self._lock is not None:
                self.__exit__()
            raise _not_created(self.path, error) from error
        return self

    def _create(self) -> None:
        """Create the folder and lock it; again if the end of another run removes the root."""
        for left in reversed(range(_TRIES)):
            try:
                _make_private(self._root)
                sweep(self._root)
                while self._lock is None:
                    self.path.mkdir(mode=0o700, exist_ok=True)
                    self._lock = _lock(self.path, fcntl.LOCK_SH)
                return
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # another process still uses it
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()
        with suppress(OSError):  # gone; but NFS and FUSE keep it until its lock is closed
            self.path.rmdir()
        with suppress(OSError):  # it holds another run's folder
            self._root.rmdir()

    @property
    def lock(self) -> int:
        """The descriptor of its lock: a process that inherits it keeps the folder alive."""
        assert self._lock is not None  # noqa: S101 - used inside the context only
        return self._lock

    def release(self) -> None:
        """Close this process's descriptor of the lock, and keep the folder.

        For folders whose lock another process has inherited.
        """
        os.close(self.lock)


def memory_folder() -> Path:
    """The parent of folders whose files are to stay in memory; of ordinary ones where none is."""
    shared = Path("/dev/shm")  # noqa: S108 - RunFolder makes a private folder in it
    return shared if os.access(shared, os.W_OK) else _temporary_files()


def remove_left(run_id: str) -> None:
    """Remove a run's folder on this host if all processes that used it were killed."""
    with suppress(DataError, OSError):  # a full disk, for one: the run itself has ended
        folder = RunFolder(run_id)
        if folder.path.is_dir():
            with folder:
                pass


def check_room(folder: Path, size: int) -> None:
    """Check that a run's folder may grow by ``size`` bytes.

    A DataError says that it would exceed the run's limit, or the free space of the disk.
    """
    path, disk = folder / _LIMIT, shutil.disk_usage(folder)
    if path.exists():
        limit, used = int(path.read_text()), _used(folder)
        if used + size > limit:
            needed, most, taken = sizes_text(size, limit, used)
            raise DataError(
                f"a dataset needs another {needed} in {folder}, but the run may use {most} on a "
                f"host and already uses {taken}. Raise disk_limit (DataConfig), or read fewer "
                "columns."
            )
    room = disk.free - (0 if path.exists() else min(_RESERVE_BYTES, disk.total // 20))
    if disk.total and size > room:  # a mounted store may not say
        needed, free = sizes_text(size, max(0, room))
        raise DataError(
            f"a dataset needs another {needed} in {folder}, but only {free} are free there. Free "
            "space, or set TMPDIR to a folder on another disk (on the executors: "
            "spark.executorEnv.TMPDIR)."
        )


def _used(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size += path.stat().st_blocks * 512
    return size


def sweep(root: Path) -> list[Path]:
    """Remove the folders that crashed runs left behind, and return them."""
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
    """Lock a folder; None if it has been removed meanwhile."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, kind)
        if os.fstat(descriptor).st_nlink:  # 0 if it was removed while this process waited
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _temporary_files() -> Path:
    try:
        return Path(temporary_files())
    except OSError as error:
        raise DataError(
            f"there is no folder for temporary files: {error}. Free space there, or set TMPDIR to "
            "another folder."
        ) from error


def _root(parent: Path) -> Path:
    return parent / f"horovod_runner-{os.getuid()}"


def _make_private(root: Path) -> None:
    """Create the user's folder. In a shared folder, another user may have taken its name."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not _is_private(status) and (not stat.S_ISDIR(status.st_mode) or _keeps_modes(root.parent)):
        raise DataError(
            f"{root} is not a private folder of this user: another user may have created it. "
            "Remove it, or set TMPDIR to another folder."
        )


def _not_created(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the scratch folder {folder} could not be created: {write_problem(error, folder.parent)}. "
        "Free space or fix the permissions there, or set TMPDIR to another folder."
    )


def _is_private(status: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and not status.st_mode & 0o077


def _keeps_modes(folder: Path) -> bool:
    """Whether a new folder there is private: a mounted store has rights of another kind."""
    made = Path(tempfile.mkdtemp(prefix=".modes-", dir=folder))
    try:
        return _is_private(made.stat())
    finally:
        made.rmdir()


def scratch_folder() -> Path:
    """A rank's folder for temporary files, or the run's; elsewhere the system's."""
    named = os.environ.get(TEMPORARY_VARIABLE) or os.environ.get(VARIABLE)
    return Path(named or temporary_files())


@contextmanager
def rank_folder(run: Path, rank: int, attempt: int) -> Iterator[Path]:
    """A folder for the temporary files of a rank in a run's: a rank that is killed removes none.

    A run's folder may last for many attempts. What earlier ones left there is removed first.
    """
    for earlier in run.glob("temporary-*-*"):
        number = earlier.name.split("-")[1]
        if number.isdecimal() and int(number) < attempt:
            shutil.rmtree(earlier, ignore_errors=True)
    folder = run / f"temporary-{attempt}-{rank}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder in :func:`scratch_folder`, removed at the end of its context."""
    return tempfile.TemporaryDirectory(prefix=f"{purpose}-", dir=scratch_folder())
