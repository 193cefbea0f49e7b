"""Puts measurements of different lengths into equal intervals of a run's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_runner.results.run import Run
from horovod_runner.wire.measurements import Machine, Profile

_MOST: Final = 120  # intervals
# An interval of which less is known stays empty.
_LEAST_KNOWN: Final = 0.1
Row = TypeVar("Row", bound=Profile | Machine)


@dataclass(frozen=True)
class Timeline:
    """Equal intervals from the beginning of a run to its end.

    Attributes:
        start: seconds since the epoch.
        width: seconds of an interval.
    """

    start: float
    width: float
    count: int

    def sums(
        self, rows: Sequence[Row], values: Callable[[Row], Sequence[float]], offset: float = 0.0
    ) -> NDArray[np.float64]:
        """Add up amounts in each interval; ``offset`` is by how much the rank's clock is ahead.

        Returns:
            A row for each interval: the seconds that are known, and the sum of each amount; NaN
            where next to nothing is known.
        """
        amounts = np.array([(row.seconds, *values(row)) for row in rows], float)
        ends = np.array([[row.time - offset - self.start] for row in rows])
        seconds = np.maximum(amounts[:, :1], 1e-9)
        edges = np.arange(self.count + 1) * self.width
        common = np.minimum(ends, edges[1:]) - np.maximum(ends - seconds, edges[:-1])
        found = (np.maximum(common, 0.0) / seconds).T @ amounts
        found[found[:, 0] < _LEAST_KNOWN * self.width] = np.nan
        return np.asarray(found)


def timeline_of(run: Run, every: Iterable[Sequence[Row]], end: float) -> Timeline | None:
    """At most 120 intervals, none shorter than a typical measurement; None without measurements."""
    rows = [row for some in every for row in some]
    if not rows:
        return None
    start = min(run.timings.queued, *(row.time - row.seconds for row in rows))
    last = max(row.time for row in rows)
    seconds = max(last, min(end, last + 60.0)) - start
    typical = median(row.seconds for row in rows)
    count = max(1, min(_MOST, int(seconds / max(typical, 1e-3))))
    return Timeline(start, seconds / count, count)
