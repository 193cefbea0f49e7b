"""A first-in, first-out queue of bytes that moves to disk when it grows.

Messages that the driver has not received yet wait here: no training loop waits for the driver, and
no message is lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import IO

from horovod_runner.common.descriptors import free_front, write_all
from horovod_runner.common.files import unnamed_file
from horovod_runner.wire.framing import LENGTH, frame


class Spool:
    """A queue for one thread.

    Args:
        memory: bytes to hold in memory, or one item that has more. Items beyond that go to an
            unnamed temporary file, which the system removes with the process.
        write: writes bytes to the descriptor of that file.
    """

    def __init__(
        self, memory: int = 4 << 20, write: Callable[[int, bytes], None] = write_all
    ) -> None:
        self._write_all = write
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
            OSError: the disk is full. The item is not queued; the earlier ones are unharmed.
        """
        # While items wait on disk, later ones go there too, or they would overtake them. An empty
        # queue has room for any item: so with a full disk the sender goes on in the end.
        is_full = self._memory_bytes + len(item) > self._memory_limit
        if self._on_disk or (self._memory and is_full):
            self._write(item)
        else:
            self._memory.append(item)
            self._memory_bytes += len(item)

    def get(self) -> bytes:
        """Remove and return the oldest item, or raise an IndexError."""
        if not self._memory and self._on_disk:
            self._refill()
        item = self._memory.popleft()
        self._memory_bytes -= len(item)
        return item

    def close(self) -> None:
        """Drop all items and the file."""
        self._memory.clear()
        self._memory_bytes = self._on_disk = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, item: bytes) -> None:
        if self._file is None:
            self._file = unnamed_file("spool", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        try:
            self._write_all(self._file.fileno(), frame(item))
        except OSError:
            self._file.truncate(end)
            raise
        self._on_disk += 1

    def _refill(self) -> None:
        """Read items back until the memory is full or the file has no more."""
        assert self._file is not None  # noqa: S101 - _on_disk counts what is in it
        self._file.seek(self._read_at)
        while self._on_disk and self._memory_bytes < self._memory_limit:
            (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
            item = self._read_exactly(length)
            self._memory.append(item)
            self._memory_bytes += length
            self._read_at += LENGTH.size + length
            self._on_disk -= 1
        if self._on_disk:
            # A queue that is never empty would otherwise keep all that ever went through it.
            free_front(self._file.fileno(), self._read_at)
        else:
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
