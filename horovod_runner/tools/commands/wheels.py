"""Gets Horovod wheels from a folder or a URL: published ones, and those that hosts share.

Published wheels (`make wheels`) lie beside ``wheels.json``, which has a record of each, see
:mod:`horovod_runner.tools.horovod_build.release`. Hosts share what they build
(`install --wheels`) like this:

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
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from horovod_runner.common.files import file_sha256, is_full
from horovod_runner.errors import InstallError
from horovod_runner.host.folders.folder import Folder, local_path
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.remote import RemoteFolder
from horovod_runner.tools.horovod_build.provenance import Provenance
from horovod_runner.tools.horovod_build.release import INDEX
from horovod_runner.tools.horovod_build.web import WebFolder, without_secrets

VARIABLE = "HOROVOD_RUNNER_WHEELS"
_POINTER = "latest.sha256"
_decode_index: Final = msgspec.json.Decoder(list[Provenance]).decode


@dataclass(frozen=True)
class Place:
    """Where wheels are taken from.

    Attributes:
        url: a path, or a URL that fsspec reads (https://, s3://, ...). https needs no fsspec. It
            may have a password: messages show :meth:`shown`.
        setting: what named it, for messages: "--wheels", or the variable's name.
    """

    url: str
    setting: str = "--wheels"

    def shown(self, inside: str = "") -> str:
        """The place, or what is in it, without passwords and signatures."""
        url = self.url
        if "://" in url:
            url = without_secrets(url.partition("?")[0])
        return "/".join([url.rstrip("/"), inside]) if inside else url

    def open(self, inside: str = "") -> Folder | WebFolder:
        """The folder, or one in it."""
        if self.url.lower().startswith(("http://", "https://")):
            return WebFolder(self.url, inside)
        url = "/".join([self.url.rstrip("/"), *filter(None, [inside])])
        path = local_path(url)
        return RemoteFolder(url) if path is None else LocalFolder(path)


def published(place: Place) -> list[Provenance] | None:
    """The records of the wheels that are published at a place; None if it has no index."""
    try:
        data = place.open().read(INDEX)
    except FileNotFoundError:
        return None
    except Exception as error:  # every kind of storage raises different ones
        raise _unreadable(place, error) from error
    try:
        return _decode_index(data)
    except (ValueError, RecursionError) as error:  # one of msgspec's, or no UTF-8
        cause = "Another version of horovod_runner may have written it."
        if not isinstance(error, msgspec.ValidationError):
            cause = "A server may have answered with another page, for example to sign in."
        raise InstallError(
            f"{place.shown(INDEX)} is not an index of wheels ({error}). {cause} "
            f"Leave {place.setting} out to build Horovod here."
        ) from error


def download(place: Place, wheel: Provenance, folder: Path) -> Path:
    """Copy a published wheel into a local folder and check its digest.

    A copy that is there already is used again if it has the digest. Several processes may do this
    at a time: each writes a file of its own, which takes its name once it is checked.
    """
    copy = folder / wheel.file
    with suppress(OSError):
        if file_sha256(copy) == wheel.sha256:
            return copy
    with room_in(folder) as room:
        part = room / wheel.file
        try:
            place.open().copy_out(wheel.file, part)
        except Exception as error:
            if is_full(error):  # the local disk: no place is written
                raise unwritable(folder, error) from error
            raise _unreadable(place, error, wheel.file) from error
        received = file_sha256(part)
        if received != wheel.sha256:
            size = part.stat().st_size
            raise InstallError(
                f"{place.shown(wheel.file)} is damaged: its SHA-256 is {received}, not "
                f"{wheel.sha256} as in {INDEX} ({size} bytes, not {wheel.size}). Nothing was "
                f"installed. Publish it again, or leave {place.setting} out to build Horovod here."
            )
        return part.replace(copy)


@contextmanager
def room_in(folder: Path) -> Iterator[Path]:
    """A new folder in a folder of the cache, for unfinished files; it is removed afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        room = tempfile.TemporaryDirectory(
            prefix=".fetched-", dir=folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise unwritable(folder, error) from error
    with room as name:
        yield Path(name)


def unwritable(folder: Path, error: Exception) -> InstallError:
    """The error of a cache that cannot be written."""
    return InstallError(
        f"wheels cannot be kept in {folder} ({type(error).__name__}: {error}). Free space there, "
        "or set XDG_CACHE_HOME to a folder that this user can write to."
    )


def _unreadable(place: Place, error: Exception, file: str = "") -> InstallError:
    what = without_secrets(f"{type(error).__name__}: {error}")
    advice = "Check the address and your access to it"
    if isinstance(error, ImportError):
        advice = "Install fsspec and its package for such a URL (s3fs for s3://)"
    elif "CERTIFICATE_VERIFY_FAILED" in what:
        advice = "Set SSL_CERT_FILE to the file with your organization's certificates"
    return InstallError(
        f"{place.setting} {place.shown(file)} could not be read ({what}). {advice}, or leave "
        f"{place.setting} out to build Horovod here."
    )


def fetch(place: Place, key: str, folder: Path) -> Path | None:
    """Copy the wheel of a build plan from a shared folder, and check its digest.

    Returns:
        The copy in ``folder``, or None if the shared folder has no wheel for the plan's key.
    """
    try:
        pointer = place.open(key).read(_POINTER).decode()
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _unreadable(place, error) from error
    match = re.fullmatch(r"([0-9a-f]{64})  ([\w.+-]+\.whl)\n?", pointer)
    if match is None:
        raise InstallError(
            f"{place.shown(f'{key}/{_POINTER}')} does not name a wheel: {pointer[:100]!r}. "
            "Remove the folder that it is in. The next install with --wheels writes it again."
        )
    digest, name = match.groups()
    copy = folder / name
    there = place.shown(f"{key}/{digest}/{name}")
    remedy = f"Remove {place.shown(key)}. The next install with --wheels writes it again."
    try:
        place.open(f"{key}/{digest}").copy_out(name, copy)
    except Exception as error:
        what = without_secrets(f"{type(error).__name__}: {error}")
        raise InstallError(f"{there} could not be copied ({what}). {remedy}") from error
    received = file_sha256(copy)
    if received != digest:
        raise InstallError(
            f"{there} is damaged: its SHA-256 is {received}. Nothing was installed. {remedy}"
        )
    return copy


def publish(place: Place, key: str, wheel: Path, say: Callable[[str], None]) -> None:
    """Copy a wheel into the shared folder. If that fails, report it and return."""
    digest = file_sha256(wheel)
    part = wheel.with_name(f".{digest}.part")
    try:
        shutil.copyfile(wheel, part)
        folder = local_path(place.url)
        if folder is not None:
            Path(folder, key, digest).mkdir(parents=True, exist_ok=True)
        place.open(f"{key}/{digest}").move_in(part, wheel.name)
        place.open(key).write(_POINTER, f"{digest}  {wheel.name}\n".encode())
    except Exception as error:  # every kind of storage raises different ones
        what = without_secrets(f"{type(error).__name__}: {error}")
        say(f"the wheel was not copied to {place.shown()}: {what}")
    else:
        say(f"copied the wheel to {place.shown()} for other hosts")
    finally:
        part.unlink(missing_ok=True)
