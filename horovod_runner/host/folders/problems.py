"""Says why a folder could not be used, and what to change."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from horovod_runner.common.files import is_full, write_problem
from horovod_runner.common.text import without_password
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.hdfs import GET_TICKET, KERBEROS, problem

_EXPIRED = (
    "Renew the credentials: files and roles are read again with the next access; for variables of "
    "the environment start the run again."
)
_MISSING = (
    "There are no credentials on this host. Set them for the driver and for the host of rank 0: a "
    "role of the machine, a file such as ~/.aws/credentials, or variables such as "
    "AWS_ACCESS_KEY_ID."
)
_REFUSED = "Access is refused: give this user the right to list, read, write and delete there."
_BUSY = (
    "The store is too busy, also after several tries: save less often, or allow more tries "
    "(AWS_RETRY_MODE=adaptive and AWS_MAX_ATTEMPTS=10 for S3)."
)
_AWAY = "The store cannot be reached: check the network, the endpoint and the proxy."
_RESTARTING = (
    "HDFS cannot read or write, also after several tries: check that its DataNodes run and have "
    "space, and that its NameNode has left safe mode (hdfs dfsadmin -safemode get)."
)
_ABSENT = "There is no such folder or bucket: create it, or correct the name."
_FULL = (
    "The disk is full: free space, keep fewer checkpoints (num_to_keep), or use another place "
    "(checkpoint_dir)."
)
#: What to do if the disk of temporary files is full.
FULL_TEMPORARY: Final = (
    "Free space there, or set TMPDIR to a folder on another disk (on the executors: "
    "spark.executorEnv.TMPDIR)."
)
_READ_ONLY = "It is read-only here: use another place, or mount it for writing."
_UNSUPPORTED = (
    "The file system does not know this operation: `horovod-runner doctor --path` says what it "
    "knows. Use another place."
)
_LOST = "The file system has lost its server: mount it again."

# By what stores say, in this order: an error of expired credentials is one of refused access, too.
_BY_TEXT: Final = (
    (KERBEROS, GET_TICKET),
    (r"expired|TokenRefreshRequired", _EXPIRED),
    (r"unable to locate credentials|NoCredentials|could not automatically determine", _MISSING),
    (r"SlowDown|throttl|TooManyRequests|reduce your request rate|ServerBusy|\b(503|429)\b", _BUSY),
    (r"SafeMode|DataTransferError|OperationFailed|BlocksNotFound|minReplication", _RESTARTING),
    (r"AccessDenied|access denied|Forbidden|\b403\b|InvalidAccessKeyId|SignatureDoesNot", _REFUSED),
    (r"NoSuchBucket", _ABSENT),
    (r"could not connect|cannot connect|connection|timed? ?out|name resolution", _AWAY),
    (r"No data received", _AWAY),
)
_BY_NUMBER: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "The file is larger than allowed here: use another place.",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.ENOENT: _ABSENT,
    errno.EBUSY: _BUSY,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.ENOSYS: _UNSUPPORTED,
    errno.ESTALE: _LOST,
    errno.ENOTCONN: _LOST,
    errno.ETIMEDOUT: _AWAY,
}


def describe(
    error: BaseException,
    otherwise: str = "Use another place.",
    *,
    folder: Path | None = None,
    full: str | None = None,
) -> str:
    """What happened, the likely cause, and what to change.

    Args:
        error: what a folder raised; a CheckpointError says all by itself.
        otherwise: what to do if nothing is known about the error.
        folder: the folder on this machine that was written to, for the error of a full disk.
        full: what to do if the disk is full; None for a folder of checkpoints.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    told = (
        write_problem(error, folder)
        if folder is not None and isinstance(error, OSError)
        else problem(error)
    )
    text = without_password(told).rstrip(". ") or type(error).__name__
    return f"{text}. {(full if is_full(error) else None) or advice(error) or otherwise}"


def advice(error: BaseException) -> str:
    """The likely cause, and what to change; empty if nothing is known about the error."""
    texts = [f"{type(each).__name__}: {_words(each)}" for each in _causes(error)]
    for pattern, sentence in _BY_TEXT:
        if any(re.search(pattern, text, re.IGNORECASE) for text in texts):
            return sentence
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno in _BY_NUMBER:
            return _BY_NUMBER[each.errno]
        # Other exceptions quote one, as MLflow's.
        quoted = re.search(r"\[Errno (\d+)\]", str(each))
        if quoted is not None and int(quoted[1]) in _BY_NUMBER:
            return _BY_NUMBER[int(quoted[1])]
    kinds = ((PermissionError, _REFUSED), (FileNotFoundError, _ABSENT), (ConnectionError, _AWAY))
    return next((sentence for kind, sentence in kinds if isinstance(error, kind)), "")


def _words(error: BaseException) -> str:
    """The text of an error without paths and URLs: a folder may be named "connections"."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return error.strerror
    words = re.split(r"[\s\"'<>]+", problem(error))
    return " ".join(word for word in words if "/" not in word)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it; an error may be its own cause."""
    each: BaseException | None = error
    for _ in range(5):
        if each is None:
            return
        yield each
        each = each.__cause__
