"""Writes all of some bytes to a descriptor, frees parts of a file, enlarges pipes, locks bytes.

Every rank imports this at its start: import nothing heavy here.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


def write_all(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of ``data``, in as many calls as it takes: one os.write may take only a part.

    Args:
        descriptor: a file or a blocking pipe.
        data: bytes, or a one-dimensional view of bytes.
        offset: where in the file to write, in bytes from its start; the file's position stays as it
            is. None: at the file's position, which moves on.

    Raises:
        OSError: the disk is full, or nobody reads the pipe. A part may have been written.
    """
    view = memoryview(data)
    while view:
        if offset is None:
            written = os.write(descriptor, view)
        else:
            written = os.pwrite(descriptor, view, offset)
            offset += written
        view = view[written:]


def free_front(descriptor: int, size: int) -> None:
    """Free the disk's blocks under the first bytes of a file, whose other bytes stay in place.

    The first ``size`` bytes then read as zeros. Does nothing on file systems without such holes,
    such as NFS before 4.2.
    """
    import ctypes

    fallocate = getattr(ctypes.CDLL(None), "fallocate64", None)
    if fallocate is not None:
        keep_size, punch_hole = 1, 2  # linux/falloc.h
        fallocate(descriptor, keep_size | punch_hole, ctypes.c_int64(0), ctypes.c_int64(size))


def enlarge_pipe(descriptor: int, size: int) -> None:
    """Give a pipe room for ``size`` bytes, unless the user's limit for pipes is reached."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, size)


def lock_byte(descriptor: int, byte: int) -> None:
    """Wait until no other process has locked a byte of a file, and lock it for this process.

    The file is open for writing, and may be shorter. The kernel unlocks the byte when this process
    ends. Threads of a process share its locks.
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, byte)


def unlock_byte(descriptor: int, byte: int) -> None:
    """Undo :func:`lock_byte`."""
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def is_byte_locked(descriptor: int, byte: int) -> bool:
    """Whether another process has locked a byte of a file."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return True
    unlock_byte(descriptor, byte)
    return False
