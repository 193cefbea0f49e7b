"""Adds up the seconds that a rank spends in calls of this package.

A rank has one clock. A call costs about a microsecond, so it runs in every training.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Final, Literal

#: What the main thread waits for, and what threads of the feed do for it meanwhile. Such a thread
#: is "idle" while a framework has not asked for the next batches.
Kind = Literal["data", "report", "checkpoint", "pack", "gather", "convert", "transform", "idle"]


class Clock:
    """Seconds by kind, and counts of batches and reports.

    Attributes:
        seconds: of the main thread, by kind.
        behind: of other threads, by kind.
        batches: how many batches the feeds have handed over.
        reports: how many reports ``main`` has sent.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.behind: dict[str, float] = {}
        self.batches = 0
        self.reports = 0
        self._main = threading.main_thread().ident
        self._depth = 0

    def add(self, kind: Kind, seconds: float) -> None:
        """Add seconds to those of the calling thread.

        Those of the main thread do not count inside a block of :meth:`timing`.
        """
        if threading.get_ident() != self._main:
            self.behind[kind] = self.behind.get(kind, 0.0) + seconds
        elif not self._depth:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def timing(self, kind: Kind) -> _Timing:
        """A context manager that adds the seconds of its block.

        Of nested blocks in the main thread only the outermost one counts.
        """
        return _Timing(self, kind)


class _Timing:
    """See :meth:`Clock.timing`."""

    __slots__ = ("_began", "_clock", "_is_main", "_kind")

    def __init__(self, clock: Clock, kind: Kind) -> None:
        self._clock = clock
        self._kind = kind
        self._is_main = threading.get_ident() == clock._main

    def __enter__(self) -> None:
        self._clock._depth += self._is_main
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = perf_counter() - self._began
        self._clock._depth -= self._is_main
        self._clock.add(self._kind, seconds)


#: This process's.
clock: Final = Clock()
