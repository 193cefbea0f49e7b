"""Frames: messages one after the other in a stream of bytes, each with its length in front."""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
    end = 0
    while end + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, end)
        if length > MAX_BYTES:
            raise ValueError(f"a frame of {length} bytes, above the limit of {MAX_BYTES}")
        if end + _LENGTH.size + length > len(data):
            break
        end += _LENGTH.size + length
    return end


def unframe(batch: bytes) -> Iterator[bytes]:
    """The messages of a batch of whole frames.

    Raises:
        ValueError: the batch does not end with a whole frame.
    """
    start = 0
    while start < len(batch):
        end = start + _LENGTH.size
        if end > len(batch):
            raise ValueError("a batch ends inside a frame's length")
        (length,) = _LENGTH.unpack_from(batch, start)
        if end + length > len(batch):
            raise ValueError("a batch ends inside a frame")
        yield batch[end : end + length]
        start = end + length
