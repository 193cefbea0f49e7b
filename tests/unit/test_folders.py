"""Folders: what errors of stores say, files from another disk, and filesystems of fsspec."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.problems import describe


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free space"),
        (OSError(errno.EROFS, "Read-only file system"), "read-only"),
        (OSError(errno.EOPNOTSUPP, "Operation not supported"), "doctor --path"),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), "mount it again"),
        (OSError(errno.EBUSY, "Please reduce your request rate."), "allow more tries"),
        (PermissionError("The provided token has expired."), "Renew the credentials"),
        (PermissionError("Forbidden"), "the right to list, read, write and delete"),
        (FileNotFoundError("The specified bucket does not exist"), "create it"),
        (ConnectionRefusedError("refused"), "check the network"),
        (RuntimeError('Could not connect to the endpoint URL: "https://x"'), "check the network"),
        (RuntimeError("Unable to locate credentials"), "no credentials on this host"),
        (RuntimeError("429 Client Error: Too Many Requests"), "allow more tries"),
        (RuntimeError("[Errno 95] Operation not supported: 'metrics/loss'"), "doctor --path"),
        (RuntimeError(""), r"RuntimeError\. Use another place\."),
    ],
    ids=str,
)
def test_an_error_of_a_store_says_what_to_change(error: Exception, remedy: str) -> None:
    with pytest.raises(AssertionError, match=remedy):
        raise AssertionError(describe(error))


def test_the_cause_of_an_error_counts_too() -> None:
    error = OSError("upload failed")
    error.__cause__ = RuntimeError("ExpiredToken")
    assert describe(error).startswith("upload failed. Renew the credentials")


def test_a_file_is_moved_in_from_another_disk(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one disk")
    memory = shared / f"horovod_runner-test-{os.getpid()}"
    memory.write_bytes(b"state")
    LocalFolder(tmp_path).move_in(memory, "file")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"state"
    assert not memory.exists()
