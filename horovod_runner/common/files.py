"""Files without a name, digests of files, and what to say of a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from horovod_runner.common.text import bytes_text


def unnamed_file(purpose: str, *, buffering: int = -1) -> IO[bytes]:
    """Open a temporary file without a name: only this process and its children can reach it.

    It is removed when the last descriptor of it is closed, also after a crash. People who list open
    files see the purpose. ``buffering`` is as in :func:`open`.

    Raises:
        OSError: the folder for temporary files is full or missing.
    """
    prefix = f"horovod_runner-{purpose}-"
    return tempfile.TemporaryFile(prefix=prefix, buffering=buffering, dir=temporary_files())


def temporary_files() -> str:
    """The folder for temporary files.

    Raises:
        OSError: no folder that Python takes for them can be written.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        free = [
            f"{bytes_text(shutil.disk_usage(folder).free)} are free in {folder}"
            for folder in (os.environ.get("TMPDIR", ""), "/tmp")  # noqa: S108
            if os.path.isdir(folder)
        ]
        raise OSError(f"{error.strerror}: {', '.join(free) or 'there is no /tmp'}") from error


def memory_file(purpose: str) -> IO[bytes]:
    """Open a file in memory without a name, which a full disk does not stop.

    An unnamed temporary file takes its place where the system has no such files.
    """
    with suppress(AttributeError, OSError):  # missing here, or a sandbox forbids it
        return open(os.memfd_create(f"horovod_runner-{purpose}"), "r+b", buffering=0)
    return unnamed_file(purpose)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or the user's quota of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_problem(error: OSError, folder: str | os.PathLike[str]) -> str:
    """The text of an error of a write; of a full disk with the folder and its free space."""
    if not is_full(error):
        return str(error)
    path = Path(folder).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    free = bytes_text(shutil.disk_usage(existing).free)
    return f"{error} in {path}, where {free} are free"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    import hashlib  # here: every rank imports this module

    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar archive; nothing gets out of ``folder``.

    Python before 3.11.4 may have no filter for that: there only plain files and folders are taken.

    Raises:
        tarfile.FilterError: the archive has something that leads out of the folder.
        ValueError: the same, or a link, without the filter.
    """
    import tarfile  # here: every rank imports this module

    options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as tar:
        for member in tar if not options else ():
            is_inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
            if not is_inside or not (member.isfile() or member.isdir()):
                raise ValueError(f"{member.name} is not a plain file or folder of the archive")
        tar.extractall(folder, **options)  # noqa: S202 - see above
