"""Frames: length-prefixed messages in a stream of bytes.

A batch is a whole number of frames, one after the other.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

MAX_BYTES: Final = 256 << 20
# Of a file in one message. Two such messages fit into a worker's pipe of 1 MiB, so it writes one
# while the other is read; and one fits into a part of the message channel.
PIECE_BYTES: Final = (1 << 19) - (1 << 12)
LENGTH: Final = struct.Struct("<I")
Batch = TypeVar("Batch", bytes, memoryview)


def frame(data: bytes) -> bytes:
    """Prefix a message's bytes with their length."""
    return LENGTH.pack(len(data)) + data


def complete(data: bytes | bytearray) -> int:
    """Count the bytes at the start of ``data`` that are whole frames.

    Raises:
        ValueError: a length is above ``MAX_BYTES``, so ``data`` is not a stream of frames.
    """
    prefix, length_at, end = LENGTH.size, LENGTH.unpack_from, 0
    last = len(data) - prefix
    while end <= last:
        (length,) = length_at(data, end)
        if length > MAX_BYTES:
            raise ValueError(f"a frame of {length} bytes, above the limit of {MAX_BYTES}")
        if end + length > last:
            break
        end += prefix + length
    return end


class FrameSplitter:
    """Cuts a stream, of which pieces arrive, into whole frames."""

    def __init__(self) -> None:
        self._partial = bytearray()  # the beginning of a frame whose end has not arrived
        self._broken = False  # whether something else than frames has arrived

    def feed(self, data: bytes) -> bytes:
        """Add a piece; returns the batch that it completes, which may be empty.

        Raises:
            ValueError: as :func:`complete`, once; from then on every piece is dropped.
        """
        if self._broken:
            return b""
        partial = self._partial
        partial += data
        try:
            end = complete(partial)
        except ValueError:
            self._broken = True
            partial.clear()
            raise
        with memoryview(partial) as view:
            batch = bytes(view[:end])
        del partial[:end]
        return batch


def unframe(batch: Batch) -> list[Batch]:
    """Split a batch into its messages; those of a memoryview are views of it, not copies.

    Raises:
        ValueError: the batch does not end with a whole frame.
    """
    # Batches may hold very many small messages: the loop looks nothing up twice.
    messages: list[Batch] = []
    length_at, start, size = LENGTH.unpack_from, 0, len(batch)
    prefix = LENGTH.size
    while start < size:
        begin = start + prefix
        if begin > size:
            raise ValueError("a batch ends inside a frame's length")
        start = begin + length_at(batch, start)[0]
        if start > size:
            raise ValueError("a batch ends inside a frame")
        messages.append(batch[begin:start])
    return messages
