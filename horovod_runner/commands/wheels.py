"""Shares Horovod wheels between hosts through a folder or a URL (`install --wheels`).

    <folder>/<key of the build plan>/latest.sha256             "<digest>  <name of the wheel>"
                                    /<digest>/<name>.whl

The key has every version that a wheel was built against, so a host copies only wheels that fit.
A wheel is stored under its SHA-256 digest and never changes. The small file that names the newest
wheel is written last, so two hosts may build at the same time.

The digest shows that a wheel is complete and unchanged. It does not show who wrote it: anyone with
write access to the folder decides what its users install, as with any package index.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from horovod_runner.checkpoints.checkpoint import file_sha256
from horovod_runner.errors import InstallError
from horovod_runner.folders.folder import Folder, local_path
from horovod_runner.folders.local import LocalFolder
from horovod_runner.folders.remote import RemoteFolder

_POINTER = "latest.sha256"


def fetch(wheels: str, key: str, folder: Path) -> Path | None:
    """Copy the wheel of a build plan into a local folder and check its digest.

    Args:
        wheels: the shared folder: a path, or a URL that fsspec reads (https://, s3://, ...).
        key: the plan's key, see :meth:`horovod_runner.horovod_build.plan.BuildPlan.key`.
        folder: the local folder.

    Returns:
        The copy, or None if the shared folder has no wheel for that key.

    Raises:
        InstallError: the shared folder cannot be read, or the wheel does not match its digest.
    """
    try:
        pointer = _open(wheels, key).read(_POINTER).decode()
    except FileNotFoundError:
        return None
    except Exception as error:
        raise InstallError(
            f"--wheels {wheels} could not be read ({type(error).__name__}: {error}). Check the "
            "address and your access to it, or leave --wheels out to build Horovod here."
        ) from error
    match = re.fullmatch(r"([0-9a-f]{64})  ([\w.+-]+\.whl)\n?", pointer)
    if match is None:
        raise InstallError(
            f"{wheels}/{key}/{_POINTER} does not name a wheel: {pointer[:100]!r}. Remove the "
            "folder that it is in. The next install with --wheels writes it again."
        )
    digest, name = match.groups()
    copy = folder / name
    remedy = f"Remove {wheels}/{key}. The next install with --wheels writes it again."
    try:
        _open(wheels, f"{key}/{digest}").copy_out(name, copy)
    except Exception as error:
        raise InstallError(
            f"{wheels}/{key}/{digest}/{name} could not be copied ({type(error).__name__}: "
            f"{error}). {remedy}"
        ) from error
    received = file_sha256(copy)
    if received != digest:
        copy.unlink()
        raise InstallError(
            f"{wheels}/{key}/{digest}/{name} is damaged: its SHA-256 is {received}. Nothing was "
            f"installed. {remedy}"
        )
    return copy


def publish(wheels: str, key: str, wheel: Path, say: Callable[[str], None]) -> None:
    """Copy a wheel into the shared folder. If that fails, report it and return.

    Args:
        wheels: see :func:`fetch`.
        key: see :func:`fetch`.
        wheel: the wheel to copy.
        say: called with the line that reports the result.
    """
    digest = file_sha256(wheel)
    part = wheel.with_name(f".{digest}.part")
    try:
        shutil.copyfile(wheel, part)
        _make(f"{wheels}/{key}/{digest}")
        _open(wheels, f"{key}/{digest}").move_in(part, wheel.name)
        _open(wheels, key).write(_POINTER, f"{digest}  {wheel.name}\n".encode())
    except Exception as error:  # every kind of storage raises different ones
        say(f"the wheel was not copied to {wheels}: {type(error).__name__}: {error}")
    else:
        say(f"copied the wheel to {wheels} for other hosts")
    finally:
        part.unlink(missing_ok=True)


def _open(wheels: str, inside: str) -> Folder:
    url = f"{wheels.rstrip('/')}/{inside}"
    path = local_path(url)
    return RemoteFolder(url) if path is None else LocalFolder(path)


def _make(url: str) -> None:
    path = local_path(url)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
