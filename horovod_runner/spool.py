"""A queue of byte strings that keeps little in memory and the rest on disk.

What the driver cannot take yet waits here, so that no training loop waits and no line is lost.
"""

from __future__ import annotations

import struct
import tempfile
from collections import deque
from typing import IO

_LENGTH = struct.Struct("<I")


class Spool:
    """First in, first out. Used by one thread.

    Args:
        memory: how many bytes are held in memory; what comes beyond goes to an unnamed temporary
            file, which goes away with the process.
    """

    def __init__(self, memory: int = 4 << 20) -> None:
        self._memory_limit = memory
        self._memory: deque[bytes] = deque()
        self._memory_bytes = 0
        self._file: IO[bytes] | None = None
        self._read_at = 0
        self._on_disk = 0

    def __len__(self) -> int:
        return len(self._memory) + self._on_disk

    def put(self, item: bytes) -> None:
        """Append an item.

        Raises:
            OSError: the disk is full; the item is not queued, and what was queued is unharmed.
        """
        # Once something waits on disk, whatever follows must wait behind it.
        if self._on_disk or self._memory_bytes + len(item) > self._memory_limit:
            self._write(item)
        else:
            self._memory.append(item)
            self._memory_bytes += len(item)

    def get(self) -> bytes:
        """Take the oldest item.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._memory and self._on_disk:
            self._refill()
        item = self._memory.popleft()
        self._memory_bytes -= len(item)
        return item

    def close(self) -> None:
        """Drop everything, the file included."""
        self._memory.clear()
        self._memory_bytes = self._on_disk = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, item: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed in close()
                prefix="horovod_runner-spool-", buffering=0
            )
        end = self._file.seek(0, 2)
        record = _LENGTH.pack(len(item)) + item
        try:
            written = 0
            while written < len(record):
                written += self._file.write(record[written:])
        except OSError:
            self._file.truncate(end)
            raise
        self._on_disk += 1

    def _refill(self) -> None:
        """Read items back until the memory is full again or the file is used up."""
        assert self._file is not None  # noqa: S101 - _on_disk says so
        self._file.seek(self._read_at)
        while self._on_disk and self._memory_bytes < self._memory_limit:
            (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
            item = self._read_exactly(length)
            self._memory.append(item)
            self._memory_bytes += length
            self._read_at += _LENGTH.size + length
            self._on_disk -= 1
        if not self._on_disk:
            self._file.truncate(0)
            self._read_at = 0

    def _read_exactly(self, count: int) -> bytes:
        assert self._file is not None  # noqa: S101
        data = b""
        while len(data) < count:
            piece = self._file.read(count - len(data))
            if not piece:
                raise OSError("a temporary file of the message queue was cut short")
            data += piece
        return data
