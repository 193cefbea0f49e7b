"""Turns SIGTERM into an exception while a command runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_raises(error: BaseException) -> Iterator[None]:
    """Raise an exception when SIGTERM arrives, so that what was begun is ended in order."""

    def end(_number: int, _frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
