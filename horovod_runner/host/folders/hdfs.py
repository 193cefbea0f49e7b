"""HDFS: repeats calls while a server restarts, shortens errors, and fits URLs to tokens."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, TypeVar
from urllib.parse import urlsplit
from xml.etree import ElementTree

from horovod_runner.host.folders.folder import PART

SCHEMES: Final = ("hdfs", "viewfs")

_T = TypeVar("_T")
#: hdfs-native would repeat for three minutes what a NameNode does not answer, and that alone.
FEW_ATTEMPTS: Final = {"dfs.client.failover.max.attempts": "3"}
_SECONDS = 180.0
_LONGEST_PAUSE = 5.0
_gave_up = -_SECONDS
_COPIED_BYTES: Final = 1 << 22
# Errors while a NameNode is in safe mode, or while no DataNode has a block.
_RESTARTING: Final = re.compile(
    "SafeModeException|RetriableException|StandbyException|NotReplicatedYetException|"
    "DataTransferError|OperationFailed|BlocksNotFound|minReplication"
)
# Rust's text of an error from a server: its class, and its words with Java's stack trace.
_FROM_SERVER: Final = re.compile(
    r'(?:Fatal)?RPCError\("(?:[\w.]+[.$])?(\w+)", "(.*?)(?:\\n.*)?"\)', re.DOTALL
)
# Rust's text of an error of Kerberos: codes, and words.
_FROM_KERBEROS: Final = re.compile(r'GSSAPIError\(.*, "(.*)"\)', re.DOTALL)
_UNKNOWN_USER: Final = re.compile(
    r"GSSAPIError|NoSASLMechanism|SASLError|SaslException|SecretManager\$InvalidToken"
)
#: Begins the text of an error by which HDFS does not know this user.
KERBEROS: Final = "Kerberos: "
#: What to do about it.
GET_TICKET: Final = (
    "Get a Kerberos ticket for this process: kinit, and klist shows it. Or let "
    "HADOOP_TOKEN_FILE_LOCATION name a file with a delegation token of this NameNode that has not "
    "expired (hdfs fetchdt)."
)


@cache
def keep_in_children(module: ModuleType) -> None:
    """Let processes fork that have used HDFS: with an import hook for ``hdfs_native.fsspec``.

    Its clients wait for their threads when they are deleted. A forked child has no such threads,
    and fsspec deletes its file systems there: the child would wait for ever.
    """
    held: list[Any] = []
    never_deleted: list[Any] = []

    def hold() -> None:
        for each in (module.HdfsFileSystem, module.ViewfsFileSystem):
            held.extend(each._cache.values())

    def keep() -> None:
        never_deleted.extend(held)
        held.clear()

    os.register_at_fork(before=hold, after_in_parent=held.clear, after_in_child=keep)


def is_hdfs(url: str) -> bool:
    """Whether a URL is for hdfs-native."""
    return url.partition("://")[0] in SCHEMES


def problem(error: BaseException) -> str:
    """The text of an error, without Java's stack trace and Kerberos's numbers."""
    text = str(error)
    short = _FROM_SERVER.sub(r"\1: \2", _FROM_KERBEROS.sub(r"\1", text)).rstrip(". ")
    return f"{KERBEROS}{short}" if _UNKNOWN_USER.search(text) else short


def as_in_token(url: str) -> str:
    """Name the NameNode of a URL by its address if a delegation token does.

    hdfs-native compares both as they are written. Hadoop's tokens are for addresses, and its URLs
    for host names.
    """
    try:
        tokens = Path(os.environ["HADOOP_TOKEN_FILE_LOCATION"]).read_bytes()
        at = urlsplit(url if urlsplit(url).netloc else _default_url())
        if at.port is None:  # a name service, which tokens name as it is
            return url
        for *_, address in socket.getaddrinfo(at.hostname, at.port, type=socket.SOCK_STREAM):
            place = f"{address[0]}:{at.port}"
            if place.encode() in tokens:
                return urlsplit(url)._replace(netloc=place).geturl()
    except (KeyError, OSError, ValueError, ElementTree.ParseError):
        pass  # it is opened as it is
    return url


def _default_url() -> str:
    """`fs.defaultFS`, empty where it is not set."""
    home = os.environ.get("HADOOP_HOME")
    folder = os.environ.get("HADOOP_CONF_DIR") or f"{home}/etc/hadoop"
    settings = ElementTree.parse(f"{folder}/core-site.xml")  # noqa: S314 - the user's own file
    for each in settings.iter("property"):
        if each.findtext("name") == "fs.defaultFS":
            return each.findtext("value", "")
    return ""


def repeat(action: Callable[[], _T]) -> _T:
    """Act; again for three minutes while HDFS restarts, unless a call has just waited in vain.

    Raises:
        OSError: it failed, also at last; a PermissionError where HDFS refuses access.
    """
    global _gave_up  # noqa: PLW0603 - of all folders: the end of a run makes several calls
    began, pause = time.monotonic(), 0.25
    end = began if began < _gave_up + _SECONDS else began + _SECONDS
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
            if not (isinstance(error, OSError) or _RESTARTING.search(text)):
                raise OSError(text) from None
            if time.monotonic() > end:
                _gave_up = time.monotonic()
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
