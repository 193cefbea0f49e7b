"""What other threads ask of a run under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_runner.driver.supervisor import Supervisor


class Requests:
    """Hands requests of other threads to whoever supervises the run.

    Attributes:
        cancelled: set once the run is to end.
        interrupted: set once Ctrl-C has raised a KeyboardInterrupt in the thread of the run.
        supervisor: of the latest attempt; None before the first launch.
    """

    def __init__(self) -> None:
        self.cancelled = Event()
        self.interrupted = Event()
        self._stacks = Event()
        self.supervisor: Supervisor | None = None

    def cancel(self) -> None:
        """End the run."""
        self.cancelled.set()
        if self.supervisor is not None:
            self.supervisor.wake()

    def show_stacks(self) -> None:
        """Have all ranks' Python stacks printed; nothing happens before the launch."""
        if self.supervisor is not None:
            self._stacks.set()
            self.supervisor.wake()

    def take_stacks(self) -> bool:
        """Whether stacks have been asked for since the last call."""
        wanted = self._stacks.is_set()
        self._stacks.clear()
        return wanted

    @contextmanager
    def answered_by(self, supervisor: Supervisor) -> Iterator[None]:
        """Wake this supervisor at a request; inside, Ctrl-C sets :attr:`interrupted`, too.

        The exception of Ctrl-C alone can get lost: Python prints and drops what is raised in a
        finalizer or in a weak reference's callback, and some C code drops it in silence. The event
        is never set outside the main thread, which alone handles signals, and where SIGINT has no
        handler that raises.
        """
        self._stacks.clear()  # asked of an attempt that had ended
        self.supervisor = supervisor
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except KeyboardInterrupt:
                self.interrupted.set()
                raise

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is handle:  # nobody has set another one since
                signal.signal(signal.SIGINT, handler)
