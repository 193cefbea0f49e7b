"""Sends to the driver what a rank did, for a comparison with what the other ranks did."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType

from horovod_runner.wire.measurements import Note, NoteKind
from horovod_runner.worker import context

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen ")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MOST = 1000  # notes of one kind


def send(kind: NoteKind, key: str, value: str = "", *, once: bool = False) -> None:
    """Send a note, see :class:`Note`, with the user's line that the caller was reached from.

    Does nothing outside a rank, or a second time for a kind and key if it is for ``once``. After a
    thousand notes of one kind the rest is left out.
    """
    rank = context.current()
    if rank is None or (once and rank.notes[f"{kind} {key}"]):
        return
    rank.notes[kind] += 1
    if rank.notes[kind] > _MOST:
        return  # nor is its key kept: each epoch may make a new one
    rank.notes[f"{kind} {key}"] += 1
    if rank.size > 1 or kind == "mistake":
        rank.pipe.send(Note(rank.rank, kind, key, value, users_line()))


def mistake(key: str, text: str) -> None:
    """Tell the user, once, of a mistake that this rank's code makes."""
    send("mistake", key, text, once=True)


def count(kind: NoteKind) -> int:
    """How often something of a kind was noted on this rank."""
    rank = context.current()
    return 0 if rank is None else rank.notes[kind]


def users_line() -> str:
    """The innermost line of the user's code, "train.py:41"; empty if there is none."""
    for frame in _outside():
        if not _is_library(frame):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def from_library() -> bool:
    """Whether a library, not the user's code, has called what has called this function."""
    return any(map(_is_library, islice(_outside(), 1)))


def _outside() -> Iterator[FrameType]:
    """The frames outside of this package and Python's standard library, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        # Without a virtual environment, libraries are in a folder of the standard library's.
        is_standard = file.startswith(_STANDARD_LIBRARY) and not _is_library(frame)
        if not is_standard and not file.startswith(_PACKAGE):
            yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _LIBRARIES)
