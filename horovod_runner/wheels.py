"""A folder or URL with wheels of Horovod that several hosts share.

    <folder>/<key of the build>/latest.sha256             "<digest>  <name of the wheel>"
                               /<digest>/<name>.whl

The key names everything that a wheel was built against, so a host takes only what fits it. A wheel
lies under its own SHA-256 digest and never changes; the small file that names the newest one is
written last. Two hosts that build at the same time therefore disturb nobody.

The digest shows that a wheel arrived as it was written. It does not show who wrote it: whoever may
write to the folder decides what its users install, as with any package index.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from horovod_runner.errors import InstallError
from horovod_runner.stores import Folder, LocalFolder, RemoteFolder, local_path

_POINTER = "latest.sha256"


def fetch(wheels: str, key: str, folder: Path) -> Path | None:
    """Copy the wheel of a build into a local folder.

    Args:
        wheels: the shared folder: a path, or a URL that fsspec reads (https://, s3://, ...).
        key: the build, see :meth:`horovod_runner.install.BuildPlan.key`.
        folder: where the copy goes.

    Returns:
        The copy, or None where the shared folder has no wheel of that build.

    Raises:
        InstallError: the shared folder cannot be read, or the wheel is not what its digest says.
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
    named = re.fullmatch(r"([0-9a-f]{64})  ([\w.+-]+\.whl)\n?", pointer)
    if named is None:
        raise InstallError(
            f"{wheels}/{key}/{_POINTER} does not name a wheel: {pointer[:100]!r}. Remove that "
            "folder: the next install with --wheels writes it anew."
        )
    digest, name = named.groups()
    copy = folder / name
    try:
        _open(wheels, f"{key}/{digest}").fetch(name, copy)
    except Exception as error:
        raise InstallError(
            f"{wheels}/{key}/{digest}/{name} could not be copied ({type(error).__name__}: "
            f"{error}). Remove {wheels}/{key}: the next install with --wheels writes it anew."
        ) from error
    found = sha256(copy)
    if found != digest:
        copy.unlink()
        raise InstallError(
            f"{wheels}/{key}/{digest}/{name} is damaged: its SHA-256 is {found}. Nothing was "
            f"installed. Remove {wheels}/{key}: the next install with --wheels writes it anew."
        )
    return copy


def publish(wheels: str, key: str, wheel: Path, say: Callable[[str], None]) -> None:
    """Copy a wheel into the shared folder; where that is not possible, say so and go on.

    Args:
        wheels: see :func:`fetch`.
        key: see :func:`fetch`.
        wheel: the wheel of that build.
        say: takes the line that tells what happened.
    """
    digest = sha256(wheel)
    part = wheel.with_name(f".{digest}.part")
    try:
        shutil.copyfile(wheel, part)
        _make(f"{wheels}/{key}/{digest}")
        _open(wheels, f"{key}/{digest}").take(part, wheel.name)
        _open(wheels, key).write(_POINTER, f"{digest}  {wheel.name}\n".encode())
    except Exception as error:  # each store has its own
        say(f"the wheel was not copied to {wheels}: {type(error).__name__}: {error}")
    else:
        say(f"copied the wheel to {wheels} for other hosts")
    finally:
        part.unlink(missing_ok=True)


def sha256(file: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _open(wheels: str, inside: str) -> Folder:
    url = f"{wheels.rstrip('/')}/{inside}"
    path = local_path(url)
    return RemoteFolder(url) if path is None else LocalFolder(path)


def _make(url: str) -> None:
    path = local_path(url)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
