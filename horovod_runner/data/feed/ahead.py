"""Prefetching: a thread that computes the next results of an iterator, which come in order."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from horovod_runner.common.threads import start_thread

S = TypeVar("S")
T = TypeVar("T")


class Ahead(Iterator[T], Generic[S, T]):
    """Iterates over ``work(item)`` of all items, computed ahead; a context manager.

    Args:
        items: an iterator, which only one thread at a time asks for an item.
        work: called with each item. Errors of it and of the iterator are raised here, in order.
        ahead: how many results are computed ahead, at most.
        is_helped: whether a thread that waits for a result computes a later one meanwhile. Then two
            items are worked on at a time, and no thread has to be woken up.
    """

    def __init__(
        self, items: Iterator[S], work: Callable[[S], T], *, ahead: int, is_helped: bool = False
    ) -> None:
        self._items = items
        self._work = work
        # In the order of items. The thread that draws an item fills its slot.
        self._slots: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        self._room = threading.Semaphore(max(1, ahead) + is_helped)
        self._drawing = threading.Lock()
        self._is_helped = is_helped
        self._closed = self._ended = False
        self._thread = start_thread("feed", self._run)

    def _run(self) -> None:
        while self._room.acquire() and not self._closed:
            try:
                if not self._make_one():
                    return
            except BaseException:  # raised again where the result is asked for
                return

    def _make_one(self) -> bool:
        """Fill the next slot; returns whether another one can follow."""
        slot: Future[T] = Future()
        try:
            with self._drawing:
                self._slots.put(slot)
                item = next(self._items)
            slot.set_result(self._work(item))
        except Exception as error:
            slot.set_exception(error)
            return False
        except BaseException as error:  # an interrupt, in the thread that waits
            slot.set_exception(error)
            raise
        finally:
            del slot  # an error refers to this frame, and would keep all its objects alive
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
            self._ended = True  # the next call ends
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
        # A loop that a global keeps is closed while Python exits. Threads are stopped by then, and
        # Python before 3.14 would wait for them for ever. One in a reference cycle may be closed by
        # the thread itself.
        if not sys.is_finalizing() and threading.current_thread() is not self._thread:
            self._thread.join()
        while not self._slots.empty():
            self._slots.get()
