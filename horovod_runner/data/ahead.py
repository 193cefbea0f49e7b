"""Work done in a thread beside whoever uses it, some items ahead, and given in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Ahead(Iterator[T], Generic[S, T]):
    """What a function makes of each item, made some items ahead; use it as a context.

    Args:
        items: an iterator, which one thread at a time asks.
        work: called with each item; what it and the iterator raise is raised here, in its place.
        ahead: how many results are made ahead, at most.
        is_helped: whether whoever waits for a result works on a later one meanwhile, in the waiting
            thread: two items are worked on at a time, and nobody sleeps to be woken up.
    """

    def __init__(
        self, items: Iterator[S], work: Callable[[S], T], *, ahead: int, is_helped: bool = False
    ) -> None:
        self._items = items
        self._work = work
        # In the order of items; each is filled by the thread that has drawn its item.
        self._slots: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        self._room = threading.Semaphore(max(1, ahead) + is_helped)
        self._drawing = threading.Lock()
        self._is_helped = is_helped
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._run, name="horovod_runner-feed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._room.acquire() and not self._closed:
            try:
                if not self._make_one():
                    return
            except BaseException:  # whoever asks is told
                return

    def _make_one(self) -> bool:
        """Fill the next slot; whether another one can follow."""
        slot: Future[T] = Future()
        try:
            with self._drawing:
                self._slots.put(slot)
                item = next(self._items)
            slot.set_result(self._work(item))
        except Exception as error:
            slot.set_exception(error)
            return False
        except BaseException as error:  # an interrupt, where the waiting thread is at it
            slot.set_exception(error)
            raise
        finally:
            del slot  # an error holds this frame, and with it all that is held here
        return True

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        slot = self._slots.get()
        self._room.release()
        while self._is_helped and not slot.done() and self._room.acquire(blocking=False):
            if not self._make_one():
                break
        try:
            return slot.result()
        except BaseException:
            self._ended = True  # for who asks again
            raise
        finally:
            del slot

    def __enter__(self) -> Ahead[S, T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread; may be called twice."""
        self._closed = True
        self._room.release()
        self._thread.join()
        while not self._slots.empty():
            self._slots.get()
