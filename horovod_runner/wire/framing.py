"""Frames: length-prefixed messages in a stream of bytes.

A batch is a whole number of frames, one after the other.
"""

from __future__ import annotations

import struct
from typing import Final

MAX_BYTES: Final = 256 << 20
LENGTH: Final = struct.Struct("<I")


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


def unframe(batch: bytes) -> list[bytes]:
    """Split a batch into its messages.

    Raises:
        ValueError: the batch does not end with a whole frame.
    """
    # Batches may hold very many small messages: the loop looks nothing up twice.
    messages, length_at, start, size = [], LENGTH.unpack_from, 0, len(batch)
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
