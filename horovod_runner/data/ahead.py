"""An iterator that works in a thread of its own, some items ahead of who uses it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Ahead(Iterator[T]):
    """Runs an iterator in a thread of its own, some items ahead; use it as a context.

    Args:
        items: the iterator; what it raises is raised here.
        ahead: how many items wait, at most.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._items = items
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(max(1, ahead))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="horovod_runner-feed", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for item in self._items:
                self._queue.put((item, None))
                if self._closed.is_set():
                    return
            self._queue.put((None, StopIteration()))
        except BaseException as error:
            self._queue.put((None, error))

    def __next__(self) -> T:
        item, error = self._queue.get()
        if error is not None:
            self._queue.put((None, StopIteration()))  # for who asks again
            raise error
        return item  # type: ignore[return-value]

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread; may be called twice."""
        self._closed.set()
        while self._thread.is_alive():
            try:  # it may wait for room
                self._queue.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)
