"""Reads a long JSON array object by object: traces may be larger than the memory."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, TextIO

_PIECE: Final = 1 << 20  # characters
_LONGEST: Final = 16 << 20  # the longest object
_BETWEEN: Final = re.compile(r"[\s,]*")


class JsonArray:
    """The objects of an array in a file; iterate over it once.

    Attributes:
        head: the text before the array.
        is_complete: whether the array has been read to its end; a rank that was killed while it
            wrote leaves a part.

    Raises:
        ValueError: the file has no such array.
    """

    def __init__(self, file: TextIO, opening: str) -> None:
        self._file = file
        self.is_complete = False
        text, found = "", None
        while found is None:
            piece = file.read(_PIECE)
            text += piece
            found = re.search(opening, text)
            if found is None and (not piece or len(text) > _LONGEST):
                raise ValueError("it is not a trace")
        self.head = text[: found.start()]
        self._text = text[found.end() :]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        text, at = self._text, 0
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches ""
            if text.startswith("]", at):
                self.is_complete = True
                return
            try:
                found, at = decode(text, at)
            except ValueError:  # it is cut here, or by the end of the piece
                piece = self._more()
                if not piece or len(text) - at > _LONGEST:
                    return
                text, at = text[at:] + piece, 0
                continue
            if isinstance(found, dict):
                yield found

    def _more(self) -> str:
        """Some more text; empty at the end, and where a compressed file is damaged."""
        with suppress(OSError, EOFError, zlib.error):
            return self._file.read(_PIECE)
        return ""
