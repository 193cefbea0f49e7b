"""Repeats calls while a server of HDFS restarts; shortens the errors of hdfs-native."""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Callable
from typing import IO, Any, Final, TypeVar

from horovod_runner.host.folders.folder import PART

SCHEMES: Final = ("hdfs", "viewfs")

_T = TypeVar("_T")
_SECONDS = 180.0  # as long as hdfs-native itself repeats what a NameNode does not answer
_LONGEST_PAUSE = 5.0
_COPIED_BYTES: Final = 1 << 22
# What a client hears while a NameNode is in safe mode, or while no DataNode has a block.
_RESTARTING: Final = re.compile(
    "SafeModeException|RetriableException|StandbyException|NotReplicatedYetException|"
    "DataTransferError|OperationFailed|BlocksNotFound|minReplication"
)
# Rust's text of an error from a server: its class, and its words with Java's stack trace.
_FROM_SERVER: Final = re.compile(
    r'(?:Fatal)?RPCError\("(?:[\w.]+[.$])?(\w+)", "(.*?)(?:\\n.*)?"\)', re.DOTALL
)


def is_hdfs(url: str) -> bool:
    """Whether a URL is for hdfs-native."""
    return url.partition("://")[0] in SCHEMES


def problem(error: BaseException) -> str:
    """What went wrong, without Java's stack trace."""
    return _FROM_SERVER.sub(r"\1: \2", str(error)).rstrip(". ")


def repeat(action: Callable[[], _T]) -> _T:
    """Act; again for three minutes while HDFS restarts.

    Raises:
        OSError: it failed, also at last; a PermissionError where HDFS refuses access.
    """
    end, pause = time.monotonic() + _SECONDS, 0.25
    while True:
        try:
            return action()
        except (FileNotFoundError, FileExistsError, PermissionError):
            raise
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of this machine: a full disk
            text = problem(error)
            if "AccessControlException" in text:
                raise PermissionError(text) from None
            passing = isinstance(error, OSError) or _RESTARTING.search(text)
            if not passing or time.monotonic() > end:
                raise OSError(text) from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def write(files: Any, path: str, source: IO[bytes]) -> None:
    """Write a file, which appears under its name when it is whole."""
    folder, _, name = path.rpartition("/")
    part = f"{folder}/{PART}{name}"
    writer = files.open(part, "wb")
    try:
        source.seek(0)  # an earlier try may have read it
        shutil.copyfileobj(source, writer, _COPIED_BYTES)
        writer.close()
    finally:
        # Its own `close` does not tell Python, which would call it again later: after a failure
        # that takes a minute, and prints a traceback.
        io.IOBase.close(writer)
    files.mv(part, path, overwrite=True)
