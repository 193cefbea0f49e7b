"""Decodes what a worker prints, and splits it into lines."""

from __future__ import annotations

import codecs
from typing import Literal

_MAX_LINE_CHARACTERS = 64 << 10


class LineSplitter:
    """Decodes one stream of a worker.

    Args:
        hold: show a line only when it is complete. Otherwise text is shown as it arrives, so that a
            single rank's progress bar moves.
    """

    def __init__(self, name: Literal["stdout", "stderr"], hold: bool) -> None:
        self.name = name
        self._hold = hold
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""

    def feed(self, data: bytes, *, final: bool = False) -> tuple[str, list[str]]:
        """Add bytes of the stream; returns the text to show now, and the lines that end here."""
        text = self._decoder.decode(data, final)
        pending = self._partial + text
        end = pending.rfind("\n") + 1
        if final or (end == 0 and len(pending) > _MAX_LINE_CHARACTERS):
            end = len(pending)  # an endless line is cut
        complete, self._partial = _last_overwrite(pending[:end]), pending[end:]
        return (complete if self._hold else text), split_lines(complete)


def split_lines(text: str) -> list[str]:
    """The lines of a text. Unlike ``str.splitlines``, only a newline ends a line."""
    return text.removesuffix("\n").split("\n") if text else []


def _last_overwrite(text: str) -> str:
    """The final state of lines that were overwritten with carriage returns."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
