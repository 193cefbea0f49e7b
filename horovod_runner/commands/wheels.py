"""Gets Horovod wheels from a folder or a URL: published ones, and those that hosts share.

Published wheels (`make wheels`) lie beside ``wheels.json``, which has a record of each, see
:mod:`horovod_runner.horovod_build.release`. Hosts share what they build (`install --wheels`) like
this:

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
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from horovod_runner.checkpoints.checkpoint import file_sha256
from horovod_runner.errors import InstallError
from horovod_runner.folders.folder import local_path
from horovod_runner.folders.local import LocalFolder
from horovod_runner.folders.remote import RemoteFolder
from horovod_runner.horovod_build.provenance import Provenance
from horovod_runner.horovod_build.release import INDEX

VARIABLE = "HOROVOD_RUNNER_WHEELS"
_POINTER = "latest.sha256"
_TIMEOUT = 60  # seconds without an answer of a web server


@dataclass(frozen=True)
class Place:
    """Where wheels are taken from.

    Attributes:
        url: a path, or a URL that fsspec reads (https://, s3://, ...). https needs no fsspec.
        setting: what named it, for messages: "--wheels", or the variable's name. Only into the
            place of --wheels are wheels copied that are built here.
    """

    url: str
    setting: str


def published(place: Place) -> list[Provenance] | None:
    """The records of the wheels that are published at a place; None if it has no index.

    Raises:
        InstallError: the place cannot be read, or its index is not one.
    """
    try:
        data = _open(place.url).read(INDEX)
    except FileNotFoundError:
        return None
    except Exception as error:  # every kind of storage raises different ones
        raise _unreadable(place, error) from error
    try:
        return msgspec.json.decode(data, type=list[Provenance])
    except msgspec.MsgspecError as error:
        raise InstallError(
            f"{place.url}/{INDEX} is not an index of wheels ({error}). Another version of "
            f"horovod_runner may have written it. Leave {place.setting} out to build Horovod here."
        ) from error


def download(place: Place, wheel: Provenance, folder: Path) -> Path:
    """Copy a published wheel into a local folder and check its digest.

    A copy that is there already is used again if it has the digest.

    Raises:
        InstallError: the wheel cannot be copied, or does not match its digest.
    """
    copy = folder / wheel.file
    if copy.exists() and file_sha256(copy) == wheel.sha256:
        return copy
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{wheel.file}.part"
    try:
        _open(place.url).copy_out(wheel.file, part)
    except Exception as error:
        part.unlink(missing_ok=True)
        raise _unreadable(place, error, wheel.file) from error
    received = file_sha256(part)
    if received != wheel.sha256:
        part.unlink()
        raise InstallError(
            f"{place.url}/{wheel.file} is damaged: its SHA-256 is {received}, not {wheel.sha256} "
            f"as in {INDEX}. Nothing was installed. Publish it again, or leave {place.setting} out "
            "to build Horovod here."
        )
    return part.replace(copy)


def _unreadable(place: Place, error: Exception, file: str = "") -> InstallError:
    where = f"{place.setting} {place.url}" + (f"/{file}" if file else "")
    return InstallError(
        f"{where} could not be read ({type(error).__name__}: {error}). Check the address and your "
        f"access to it, or leave {place.setting} out to build Horovod here."
    )


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
        raise _unreadable(Place(wheels, "--wheels"), error) from error
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


class _Store(Protocol):
    """The methods of :class:`~horovod_runner.folders.folder.Folder` that are used here."""

    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def move_in(self, part: Path, name: str) -> None: ...
    def copy_out(self, name: str, path: Path) -> None: ...


class _Web:
    """A folder on a web server, read without fsspec, which needs aiohttp for it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read(self, name: str) -> bytes:
        with self._get(name) as answer:
            data: bytes = answer.read()
            return data

    def copy_out(self, name: str, path: Path) -> None:
        with self._get(name) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)

    def write(self, name: str, data: bytes) -> None:
        raise OSError(f"{self._url}: a web server can only be read")

    def move_in(self, part: Path, name: str) -> None:
        self.write(name, b"")

    def _get(self, name: str) -> Any:
        try:
            # The scheme is http or https: _open has looked.
            return urllib.request.urlopen(f"{self._url}/{quote(name)}", timeout=_TIMEOUT)  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(error.url) from error
            raise


def _open(wheels: str, inside: str = "") -> _Store:
    url = "/".join([wheels.rstrip("/"), *filter(None, [inside])])
    if url.startswith(("http://", "https://")):
        return _Web(url)
    path = local_path(url)
    return RemoteFolder(url) if path is None else LocalFolder(path)


def _make(url: str) -> None:
    path = local_path(url)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
