"""Writes all of some bytes to a file descriptor: one os.write may take only a part of them.

Every rank imports this at its start: import nothing heavy here.
"""

from __future__ import annotations

import os


def write_all(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of ``data``, in as many calls as it takes.

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
