"""What ``main`` may call while it runs as a rank: `log_to_driver`.

Messages leave the worker through a pipe to the process that watches it. A write there costs
microseconds, and what was written is delivered even if the worker is killed right after.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_runner.messages import Message

_current: Context | None = None


class Context:
    """A rank's way out of its worker.

    Args:
        rank: the rank.
        frames: the descriptor of the pipe to the watching process.
        lock_file: a descriptor that this process and its forks share, to take turns on.
    """

    def __init__(self, rank: int, frames: int, lock_file: int) -> None:
        self.rank = rank
        self._frames = frames
        self._lock_file = lock_file
        self._threads = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread may have held the lock at the moment of the fork.
        self._threads = threading.Lock()

    def send(self, message: Message) -> None:
        """Hand a message to the watching process."""
        from horovod_runner import messages
        from horovod_runner.frames import frame

        data = memoryview(frame(messages.encode(message)))
        # Threads take turns by the lock; processes (a DataLoader's workers) by the lock file: only
        # short writes to a pipe are atomic.
        with self._threads:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
            try:
                while data:
                    data = data[os.write(self._frames, data) :]
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)


def enter(context: Context) -> None:
    """Make a context the one of this process."""
    global _current  # noqa: PLW0603 - a process runs one rank
    _current = context


def current() -> Context | None:
    """The context of this process; None outside a worker."""
    return _current


def log_to_driver(message: str) -> None:
    """Show a line on the driver, whatever ``driver_log_verbosity`` is.

    Comes from HorovodRunner's ``sparkdl.horovod.log_to_driver``; texts of any length arrive whole.
    Outside a worker (the function called directly, in a test say) it prints.

    Args:
        message: the text; anything else is turned into one by ``str``.
    """
    text = str(message)
    context = current()
    if context is None:
        print(text)
    else:
        from horovod_runner import messages  # not above: a worker starts without

        context.send(messages.Log(context.rank, text))
