"""Frames: messages one after the other in a stream of bytes, each with its length in front."""

from __future__ import annotations

import struct

MAX_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """A message's bytes with their length in front."""
    return _LENGTH.pack(len(data)) + data


def complete(data: bytes | bytearray) -> int:
    """How many bytes at the start of ``data`` are whole frames.

    Raises:
        ValueError: a frame claims to be larger than any can be: this is no stream of frames.
    """
    length_at, end, last = _LENGTH.unpack_from, 0, len(data) - 4
    while end <= last:
        (length,) = length_at(data, end)
        if length > MAX_BYTES:
            raise ValueError(f"a frame of {length} bytes, above the limit of {MAX_BYTES}")
        if end + length > last:
            break
        end += 4 + length
    return end


def unframe(batch: bytes) -> list[bytes]:
    """The messages of a batch of whole frames.

    Raises:
        ValueError: the batch does not end with a whole frame.
    """
    # There may be very many: nothing is looked up twice here.
    found, length_at, start, size = [], _LENGTH.unpack_from, 0, len(batch)
    while start < size:
        begin = start + 4
        if begin > size:
            raise ValueError("a batch ends inside a frame's length")
        start = begin + length_at(batch, start)[0]
        if start > size:
            raise ValueError("a batch ends inside a frame")
        found.append(batch[begin:start])
    return found
