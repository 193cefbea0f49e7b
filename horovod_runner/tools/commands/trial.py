"""Tries a folder: what works there, how fast, and what does not. For `horovod-runner doctor`."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from uuid import uuid4

import psutil

from horovod_runner.common.text import without_password
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.folder import PART, Folder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.problems import advice

_BYTES: Final = 16 << 20
_SMALL_FILES: Final = 8


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the doctor's report: what was examined, and how."""

    name: str
    status: Literal["ok", "absent", "wrong"]  # what is absent is not needed
    detail: str  # the version, count, rate or error
    advice: str = ""  # how to fix what is wrong


def try_folder(url: str) -> Iterator[DoctorFinding]:
    """Write, list, read and delete files as runs do, and try what runs can do without.

    Writes 16 MiB, and leaves nothing behind. Nothing is tried after a failure of what runs need.
    """
    try:
        folder = open_folder(url, check=True)
    except CheckpointError as error:
        yield DoctorFinding("folder", "wrong", str(error), "do what the text says")
        return
    path = folder.local("")
    name = f".trial-{uuid4().hex[:8]}"
    with new_removed(path):
        try:
            with tempfile.TemporaryDirectory(prefix="horovod_runner-trial-") as here:
                yield from _try(folder, path, name, Path(here))
        finally:
            with suppress(Exception):  # what cannot be removed was said
                for left in folder.names():
                    if name in left:
                        folder.remove(left)


@contextmanager
def new_removed(path: Path | None) -> Iterator[None]:
    """Remove a folder and its parents at the end if they do not exist yet, and are empty then."""
    new = [] if path is None else [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    finally:
        with suppress(OSError):
            for each in new:
                each.rmdir()


def _try(folder: Folder, path: Path | None, name: str, here: Path) -> Iterator[DoctorFinding]:
    data = os.urandom(_BYTES)
    needed: list[tuple[str, Callable[[], str]]] = [
        ("folder", lambda: _open(folder, path)),
        ("write", lambda: _write(folder, path, name, data, here)),
        ("list", lambda: _list(folder, name)),
        ("read", lambda: _read(folder, path, name, data, here)),
        ("small files", lambda: _write_small(folder, name)),
        ("delete", lambda: _delete(folder, name)),
    ]
    for what, act in needed:
        try:
            yield DoctorFinding(what, "ok", act())
        except Exception as error:  # every kind of folder raises different ones
            detail = without_password(f"{type(error).__name__}: {error}")
            yield DoctorFinding(what, "wrong", detail, advice(error) or "use another place")
            return
    if path is not None:
        for what, consequence, do in _OPTIONAL:
            try:
                do(path / f"{name}-{what.replace(' ', '-')}")
            except OSError as error:
                yield DoctorFinding(what, "absent", f"{error.strerror or error}: {consequence}")
            else:
                yield DoctorFinding(what, "ok", "works")


def _open(folder: Folder, path: Path | None) -> str:
    if path is None:
        return without_password(folder.url)
    path.mkdir(parents=True, exist_ok=True)
    mounts, resolved = psutil.disk_partitions(all=True), path.resolve()
    homes = [each for each in mounts if resolved.is_relative_to(each.mountpoint)]
    kind = max(homes, key=lambda each: len(each.mountpoint)).fstype if homes else "unknown"
    return f"{path} ({kind})"


def _write(folder: Folder, path: Path | None, name: str, data: bytes, here: Path) -> str:
    part = (here if path is None else path) / f"{PART}{name}"
    began = time.perf_counter()
    part.write_bytes(data)
    if path is None:
        began = time.perf_counter()
    try:
        folder.move_in(part, name)
    finally:
        part.unlink(missing_ok=True)
    text = _rate(began)
    size = folder.size(name)
    if size != len(data):
        raise OSError(f"the file has {size} bytes after {len(data)} were written")
    return text


def _list(folder: Folder, name: str) -> str:
    began = time.perf_counter()
    names = folder.names()
    if name not in names:
        raise OSError(f"a new file is missing in the list of {len(names)} files")
    return f"{(time.perf_counter() - began) * 1e3:.0f} ms for {len(names)} files"


def _read(folder: Folder, path: Path | None, name: str, data: bytes, here: Path) -> str:
    if path is not None:
        with (path / name).open("rb") as file, suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
    began = time.perf_counter()
    folder.copy_out(name, here / name)
    text = _rate(began)
    if (here / name).read_bytes() != data:
        raise OSError("the file has other bytes than were written")
    return text


def _write_small(folder: Folder, name: str) -> str:
    began = time.perf_counter()
    for number in range(_SMALL_FILES):
        folder.write(f"{name}.json", str(number).encode())
    each = (time.perf_counter() - began) / _SMALL_FILES
    found = folder.read(f"{name}.json")
    if found != str(_SMALL_FILES - 1).encode():
        raise OSError(f"a file that was replaced {_SMALL_FILES - 1} times still has {found!r}")
    return f"{each * 1e3:.0f} ms for each"


def _delete(folder: Folder, name: str) -> str:
    began = time.perf_counter()
    folder.remove(name)
    folder.remove(f"{name}.json")
    seconds = (time.perf_counter() - began) / 2
    left = [each for each in folder.names() if name in each]
    if left:
        raise OSError(f"{len(left)} files are still listed after they were deleted")
    return f"{seconds * 1e3:.0f} ms for each"


def _rate(began: float) -> str:
    seconds = max(time.perf_counter() - began, 1e-6)
    return f"{_BYTES / 1e6 / seconds:.0f} MB/s ({_BYTES >> 20} MiB in {seconds:.2f} s)"


def _rename(path: Path) -> None:
    path.write_bytes(b"1")
    target = path.with_name(f"{path.name}-new")
    target.write_bytes(b"2")
    path.replace(target)


def _write_back(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(b"12")
        file.seek(0)
        file.write(b"3")


def _append(path: Path) -> None:
    path.write_bytes(b"1")
    with path.open("ab", buffering=0) as file:
        file.write(b"2")


def _link(path: Path) -> None:
    path.write_bytes(b"1")
    path.with_name(f"{path.name}-new").hardlink_to(path)


def _lock(path: Path) -> None:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _map(path: Path) -> None:
    path.write_bytes(b"1")
    with path.open("rb") as file:
        mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ).close()


def _make_private(path: Path) -> None:
    path.touch(mode=0o600)
    if stat.S_IMODE(path.stat().st_mode) != 0o600:
        raise OSError("files have the store's own rights")


_COPY: Final = "runs do not need it. Of your own files, write those elsewhere and copy them:"
# Operations that runs can do without: name, consequence where it is missing, and how to try it.
_OPTIONAL: Final[tuple[tuple[str, str, Callable[[Path], None]], ...]] = (
    ("rename", "files are copied instead, so checkpoints take twice as long", _rename),
    ("random write", f"{_COPY} .npz, .keras, .h5, .zip, SQLite", _write_back),
    ("append", f"{_COPY} logs, MLflow's folder of files", _append),
    ("link", "runs do not need it", _link),
    ("lock", "this folder cannot be a shared_dir", _lock),
    ("map into memory", "a shared_dir here is read file by file, with more memory", _map),
    ("private files", "its own rights decide who can read checkpoints", _make_private),
)
