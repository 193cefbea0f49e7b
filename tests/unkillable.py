"""A file system that does not answer: a process that looks into it ends by no signal."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_REQUEST = struct.Struct("<IIQ")  # its length, the operation, its number
_ANSWER = struct.Struct("<IiQ")  # its length, an error, the request's number
_LOOKUP, _FORGET, _INIT = 1, 2, 26
_PROTOCOL = struct.pack("<IIIIHHII", 7, 31, 0, 0, 12, 10, 4096, 1).ljust(64, b"\0")
_FORCE, _DETACH = 1, 2
_asked: list[threading.Event] = []  # of the file systems that this process serves


@contextmanager
def unkillable() -> Iterator[Path]:
    """The path of a file: whoever looks for it waits in the kernel (state D) until the end.

    FUSE, whose server takes the request and never answers, as an NFS server that is gone. Only root
    may mount one.
    """
    if os.getuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("only root makes a process that no signal ends, by /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tempfile.mkdtemp(prefix="unkillable-", dir="/tmp")
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"unkillable", folder.encode(), b"fuse", 0, options):
        os.close(fuse)
        os.rmdir(folder)
        pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    _asked.append(threading.Event())
    server = threading.Thread(target=_serve, args=[fuse, _asked[-1]])
    server.start()
    try:
        yield Path(folder, "file")
    finally:
        libc.umount2(folder.encode(), _FORCE)  # all who wait get an error, and SIGKILL ends them
        libc.umount2(folder.encode(), _DETACH)
        server.join()
        _asked.pop()
        os.close(fuse)
        os.rmdir(folder)


def await_waiting(pids: Iterable[int], seconds: float = 60) -> None:
    """Wait until processes wait for the file system: one of them for the answer to all.

    Before the server has taken the request, a signal still ends the one that made it.
    """
    end = time.monotonic() + seconds
    assert all(asked.wait(seconds) for asked in _asked)  # none where the server is elsewhere
    for pid in pids:
        while not re.search("fuse_lookup|d_alloc_parallel", Path(f"/proc/{pid}/stack").read_text()):
            assert time.monotonic() < end, pid
            time.sleep(0.02)


def _serve(fuse: int, asked: threading.Event) -> None:
    while True:
        try:
            request = os.read(fuse, 1 << 17)
        except OSError:  # it has been unmounted
            return
        _, operation, number = _REQUEST.unpack_from(request)
        if operation == _INIT:
            os.write(fuse, _ANSWER.pack(_ANSWER.size + len(_PROTOCOL), 0, number) + _PROTOCOL)
        elif operation == _LOOKUP:
            asked.set()
        elif operation != _FORGET:
            os.write(fuse, _ANSWER.pack(_ANSWER.size, -errno.ENOSYS, number))
