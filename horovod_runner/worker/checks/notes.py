"""Sends to the driver what a rank did, for a comparison with what the other ranks did."""

from __future__ import annotations

import os
import sys

from horovod_runner.wire.measurements import Note, NoteKind
from horovod_runner.worker import context

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen ")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MOST = 1000  # notes of one kind


def send(kind: NoteKind, key: str, value: str = "", *, once: bool = False) -> None:
    """Send a note with the line of the user's code that the caller was reached from.

    Does nothing outside a rank. After a thousand notes of one kind the rest is left out.

    Args:
        kind: see :class:`Note`.
        key: see there.
        value: see there.
        once: whether to leave the note out if one of this kind and key was sent before.
    """
    rank = context.current()
    if rank is None or (once and rank.notes[f"{kind} {key}"]):
        return
    rank.notes[f"{kind} {key}"] += 1
    rank.notes[kind] += 1
    if rank.notes[kind] <= _MOST and (rank.size > 1 or kind == "mistake"):
        rank.pipe.send(Note(rank.rank, kind, key, value, users_line()))


def count(kind: NoteKind) -> int:
    """How often something of a kind was noted on this rank."""
    rank = context.current()
    return 0 if rank is None else rank.notes[kind]


def users_line() -> str:
    """The innermost line of the user's code, "train.py:41"; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (
            file.startswith((_PACKAGE, _STANDARD_LIBRARY))
            or any(part in file for part in _LIBRARIES)
        ):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
