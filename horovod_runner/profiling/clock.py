"""Adds up the seconds that a rank spends in calls of this package.

A rank has one clock. A call costs a fraction of a microsecond, so it runs in every training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, Literal

#: What the main thread waits for, and what threads of the feed do for it meanwhile.
Kind = Literal["data", "report", "checkpoint", "pack", "gather", "convert", "transform"]


class Clock:
    """Seconds by kind, and counts of batches and reports.

    Attributes:
        seconds: of the main thread, by kind.
        behind: of other threads, by kind.
        batches: how many batches the feeds have handed over.
        reports: how many reports ``main`` has sent.
        after: called after each of them, in the thread that has made it; must not raise.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.behind: dict[str, float] = {}
        self.batches = 0
        self.reports = 0
        self.after: Callable[[], None] | None = None
        self._main = threading.main_thread().ident

    def count_batch(self) -> None:
        """Count a batch that a feed hands over."""
        self.batches += 1
        if self.after is not None:
            self.after()

    def count_report(self) -> None:
        """Count a report."""
        self.reports += 1
        if self.after is not None:
            self.after()

    def add(self, kind: Kind, seconds: float) -> None:
        """Add seconds to those of the calling thread."""
        by_kind = self.seconds if threading.get_ident() == self._main else self.behind
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds

    @contextmanager
    def timing(self, kind: Kind) -> Iterator[None]:
        """Add the seconds of a block; for what takes longer than some microseconds."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(kind, perf_counter() - began)


#: This process's.
clock: Final = Clock()
