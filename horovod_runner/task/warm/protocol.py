"""How tasks and fork servers talk: the socket, its messages, and the variables of a rank.

A fork server listens on a Unix socket in a folder that only its user can enter.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: Variables that ``hvd.init()`` reads (horovod 0.28.1, common/operations.cc) and no import does, so
#: that runs which differ in them can share a fork server. ``hang_timeout`` sets one of them.
_READ_BY_INIT: Final = frozenset(
    {
        "HOROVOD_AUTOTUNE",
        "HOROVOD_AUTOTUNE_LOG",
        "HOROVOD_CACHE_CAPACITY",
        "HOROVOD_CONTROLLER",
        "HOROVOD_CPU_OPERATIONS",
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_FUSION_THRESHOLD",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "HOROVOD_MPI_NO_FINALIZE",
        "HOROVOD_STALL_CHECK_DISABLE",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "HOROVOD_TIMELINE_MARK_CYCLES",
    }
)
#: Variables that differ between ranks or between runs. A fork server has none of them.
RANK_VARIABLES: Final = _READ_BY_INIT | frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GROUP_RANK",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_MPI_WORLD_SIZE",
        "HOROVOD_RANK",
        "HOROVOD_RUNNER_DATA",
        "HOROVOD_RUNNER_DEVICE",
        "HOROVOD_RUNNER_LEFT",
        "HOROVOD_RUNNER_RUN",
        "HOROVOD_RUNNER_TEMPORARY",
        "HOROVOD_SIZE",
        "HOROVOD_TIMELINE",
        "KINETO_LOG_LEVEL",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMI_FD",
        "PMI_RANK",
        "PMI_SIZE",
        "PYTEST_CURRENT_TEST",
        "RANK",
        "WORLD_SIZE",
    }
)
#: A fork server's run id: as long as a real one, which replaces it in a forked worker.
NO_RUN: Final = "-" * 8
#: A request for a guard and its worker; descriptors come with it.
FORK: Final = b"fork"
#: Says that the task still waits for the guard that was forked for it.
GO: Final = b"go"
#: Ends the fork server.
END: Final = b"end"
_SOCKET, _MODULES = "socket", "modules"


def listen(folder: Path, modules: Sequence[str]) -> socket.socket:
    """Open the socket of a fork server, and write down in its folder what it imports."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short_path(folder) as short:
            listener.bind(f"{short}/{_SOCKET}")
        listener.listen(128)
        write_modules(folder, modules)
    except BaseException:
        listener.close()
        raise
    return listener


def write_modules(folder: Path, modules: Iterable[str]) -> None:
    """Say what the fork server of a folder imports, or has imported."""
    temporary = folder / f"{_MODULES}.new"
    temporary.write_text("\n".join(modules))
    temporary.replace(folder / _MODULES)


def imported_modules(folder: Path) -> list[str]:
    """The modules that the fork server of a folder imports; empty if there is no fork server."""
    try:
        return (folder / _MODULES).read_text().split()
    except OSError:
        return []


def connect(folder: Path, seconds: float) -> socket.socket:
    """Connect to the fork server of a folder; each call of the socket has a timeout in seconds.

    Raises:
        OSError: there is no fork server.
        ValueError: it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        with _short_path(folder) as short:
            connection.connect(f"{short}/{_SOCKET}")
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> None:
    """Raise a ValueError unless the process at the other end belongs to this user."""
    _, uid = peer(connection)
    if uid != os.getuid():
        raise ValueError(f"the process at the other end belongs to user {uid}, not {os.getuid()}")


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id at the other end of a Unix socket."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Another path of a folder: a socket's path is limited to 107 characters, TMPDIR is not."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
