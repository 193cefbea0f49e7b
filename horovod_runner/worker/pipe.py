"""The worker's pipe for messages to the driver. The task reads it and sends them on.

A write costs microseconds. What was written is delivered even if the worker is killed right after.
"""

from __future__ import annotations

import os
import threading

from horovod_runner.common.descriptors import lock_byte, unlock_byte, write_all
from horovod_runner.wire import events, messages
from horovod_runner.wire.framing import frame
from horovod_runner.wire.job_file import PIPE_BYTE


class Pipe:
    """The worker's end of the pipe.

    Args:
        lock_file: the descriptor of a file that this process and its forks share, for locking.
    """

    def __init__(self, descriptor: int, lock_file: int) -> None:
        self._descriptor = descriptor
        self._lock_file = lock_file
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread may have held the lock at the moment of the fork.
        self._lock = threading.Lock()

    def send(self, message: events.Message) -> None:
        """Send a message. Waits if the pipe is full."""
        self.send_batch(frame(messages.encode(message)))

    def send_batch(self, batch: bytes) -> None:
        """Send framed messages. Waits if the pipe is full."""
        # Only short writes to a pipe are atomic. The lock separates threads, the lock file
        # processes (a DataLoader's workers).
        with self._lock:
            lock_byte(self._lock_file, PIPE_BYTE)
            try:
                write_all(self._descriptor, batch)
            finally:
                unlock_byte(self._lock_file, PIPE_BYTE)
