"""Which run owns a folder of checkpoints: of those with ``resume=True``, the latest that began.

Such a run writes its id into the folder, in place of that of the run before. From then on the
earlier run completes no checkpoint there: it has crashed, or the same training was started twice.
There is nothing to renew and nothing that expires, so no clocks are compared, a crashed run needs
no proof of its death, and it works in object stores, too.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Final

import msgspec

from horovod_runner.common.text import without_password
from horovod_runner.host.folders.folder import Folder

_FILE: Final = ".resumed-by"


class Owner(msgspec.Struct, frozen=True):
    """The file in the folder."""

    run_id: str
    host: str  # of its driver
    began: float  # seconds since the Unix epoch; for people only


_decode: Final = msgspec.json.Decoder(Owner).decode


def take_over(folder: Folder, run_id: str) -> str:
    """Make a run the owner of a folder; returns the id of the run before, empty if there is none.

    Raises:
        OSError: files can neither be replaced nor removed there.
        Exception: the folder cannot be used; every kind of folder raises different ones.
    """
    before = _read(folder)
    text = msgspec.json.encode(Owner(run_id, socket.gethostname(), time.time()))
    try:
        folder.write(_FILE, text)
    except OSError:  # as Mountpoint for S3, which replaces no file unless it is told to
        folder.remove(_FILE)
        folder.write(_FILE, text)
    return "" if before is None else before.run_id


def taken_from(folder: Folder, run_id: str) -> str:
    """Why a run may not complete a checkpoint in a folder; empty if the folder is still its own.

    Raises:
        Exception: the folder cannot be read; every kind of folder raises different ones.
    """
    owner = _read(folder)
    if owner is None or owner.run_id == run_id:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.began))
    return (
        f"run {owner.run_id}, which host {owner.host} began later with resume=True ({since}), has "
        f"taken over {without_password(folder.url)}, so this run saves no more checkpoints there. "
        "If the same training was started twice, end one of the two runs; otherwise give each its "
        "own checkpoint_dir."
    )


def _read(folder: Folder) -> Owner | None:
    # None has it yet, or a user has removed it; or another version wrote it.
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return _decode(folder.read(_FILE))
    return None
