"""Adds up the seconds that a rank spends in calls of this package.

A rank has one clock. A call costs about a microsecond, so it runs in every training.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final


class Clock:
    """Seconds by kind, and counts of batches and reports.

    Attributes:
        seconds: of the main thread: "data" (waiting for a batch), "report", "checkpoint".
        stages: of all threads, by what they do for a feed: "gather", "convert", "decode COLUMN",
            "transform", "pack"; "idle": the framework has not asked for the next batches.
        cells: numbers in the first part of these batches.
        after: called after each batch, report and step of an optimizer, in the thread that has made
            it; must not raise. The profiler of the framework sets it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.stages: dict[str, float] = {}
        self.batches = 0
        self.cells = 0
        self.reports = 0
        self.after: Callable[[], None] | None = None
        self._main = threading.main_thread().ident
        self._depth = 0

    def stage(self, name: str) -> _Stage:
        """A context manager that adds the seconds of its block to a stage of the feed."""
        return _Stage(self.stages, name)

    def count_report(self) -> None:
        """Count a report."""
        self.reports += 1
        self.end_step()

    def count_batch(self, cells: int) -> None:
        """Count a batch that is handed over, and the numbers in its first part."""
        self.batches += 1
        self.cells += cells
        self.end_step()

    def end_step(self) -> None:
        """Say that something is done which may be a step of the training."""
        if self.after is not None:
            self.after()

    def timing(self, kind: str) -> _Timing:
        """A context manager that adds the seconds of its block, in the main thread.

        Of nested blocks only the outermost one counts.
        """
        return _Timing(self, kind)


class _Stage:
    """Adds the seconds of a block to those of a name; without the cost of a generator."""

    __slots__ = ("_began", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = self._seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + perf_counter() - self._began


class _Timing(_Stage):
    """See :meth:`Clock.timing`."""

    __slots__ = ("_clock", "_is_main")

    def __init__(self, clock: Clock, name: str) -> None:
        super().__init__(clock.seconds, name)
        self._clock = clock
        self._is_main = threading.get_ident() == clock._main

    def __enter__(self) -> None:
        self._clock._depth += self._is_main
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._clock._depth -= self._is_main
        if self._is_main and not self._clock._depth:
            super().__exit__()


def cells(batch: Any) -> int:
    """How many numbers the first part of a batch has; if its rows differ in length, its first row.

    The first rows of many batches are a sample of all rows.
    """
    for _ in range(4):  # parts of parts
        try:
            if hasattr(batch, "shape"):
                return int(math.prod(batch.shape))
        except Exception:  # a framework's own, where a dimension is unknown or differs by row
            return 0
        if isinstance(batch, dict):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, tuple) and batch:
            batch = batch[0]
        elif isinstance(batch, list) and batch:
            if isinstance(batch[0], int | float | str | bytes):
                return len(batch)
            batch = batch[0]
        else:
            return 0
    return 0


#: This process's.
clock: Final = Clock()
