"""A worker's way out: the pipe to the process that watches it.

A write there costs microseconds, and what was written is delivered even if the worker is killed
right after.
"""

from __future__ import annotations

import fcntl
import os
import threading

_current: Pipe | None = None


class Pipe:
    """The worker's end.

    Args:
        rank: whose it is.
        descriptor: the pipe's.
        lock_file: a descriptor that this process and its forks share, to take turns on.
    """

    def __init__(self, rank: int, descriptor: int, lock_file: int) -> None:
        self.rank = rank
        self._descriptor = descriptor
        self._lock_file = lock_file
        self._threads = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread may have held the lock at the moment of the fork.
        self._threads = threading.Lock()

    def send(self, batch: bytes) -> None:
        """Hand framed messages to the watching process."""
        data = memoryview(batch)
        # Threads take turns by the lock; processes (a DataLoader's workers) by the lock file: only
        # short writes to a pipe are atomic.
        with self._threads:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)


def enter(pipe: Pipe) -> None:
    """Make a pipe the one of this process."""
    global _current  # noqa: PLW0603 - a process runs one rank
    _current = pipe


def current() -> Pipe | None:
    """The pipe of this process; None outside a worker."""
    return _current
