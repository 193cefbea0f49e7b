"""Puts measurements of different lengths into equal intervals of a run's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol, TypeVar

from horovod_runner.results.run import Run

_MOST: Final = 120  # intervals
# An interval of which less is known stays empty.
_LEAST_KNOWN: Final = 0.1


class Measured(Protocol):
    """What was measured in the ``seconds`` before ``time``."""

    @property
    def time(self) -> float:
        """Seconds since the epoch."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """The length."""
        raise NotImplementedError


Row = TypeVar("Row", bound=Measured)


@dataclass(frozen=True)
class Timeline:
    """Equal intervals from the beginning of a run to its end.

    Attributes:
        start: seconds since the epoch.
        width: seconds of an interval.
        count: the number of intervals.
    """

    start: float
    width: float
    count: int

    @property
    def seconds(self) -> float:
        """The length of all intervals."""
        return self.width * self.count

    def middle(self, number: int) -> float:
        """The middle of an interval, in seconds since the start."""
        return (number + 0.5) * self.width

    def parts(self, row: Measured, offset: float = 0.0) -> Iterator[tuple[int, float]]:
        """Yield the intervals that a measurement touches, and the share of it in each.

        Args:
            row: the measurement.
            offset: seconds by which its clock is ahead.
        """
        end = (row.time - offset - self.start) / self.width
        length = max(row.seconds / self.width, 1e-9)
        begin = end - length
        for number in range(max(0, int(begin)), min(self.count, int(end) + 1)):
            share = (min(end, number + 1.0) - max(begin, float(number))) / length
            if share > 0:
                yield number, share

    def sums(
        self,
        rows: Iterable[Row],
        values: Callable[[Row], tuple[float, ...]],
        offset: float = 0.0,
    ) -> list[tuple[float, ...] | None]:
        """Add up amounts in each interval.

        Args:
            rows: the measurements of one rank.
            values: the amounts of a measurement.
            offset: seconds by which the clock of the rank's host is ahead.

        Returns:
            For each interval the seconds that are known, and the sum of each amount; None where
            next to nothing is known.
        """
        found: list[list[float] | None] = [None] * self.count
        for row in rows:
            amounts = (row.seconds, *values(row))
            for number, share in self.parts(row, offset):
                cell = found[number]
                if cell is None:
                    found[number] = [share * amount for amount in amounts]
                else:
                    for index, amount in enumerate(amounts):
                        cell[index] += share * amount
        least = _LEAST_KNOWN * self.width
        return [None if cell is None or cell[0] < least else tuple(cell) for cell in found]


def timeline_of(run: Run, rows: Iterable[Measured], end: float) -> Timeline | None:
    """Choose the intervals for measurements of a run.

    Args:
        run: the run.
        rows: all measurements.
        end: of the run, or of what is known of it; in seconds since the epoch.

    Returns:
        At most 120 intervals, none shorter than a typical measurement; None without measurements.
    """
    spans = [(row.time - row.seconds, row.time, row.seconds) for row in rows]
    if not spans:
        return None
    start = min([run.timings.queued, *(begin for begin, _, _ in spans)])
    last = max(time for _, time, _ in spans)
    seconds = max(last, min(end, last + 60.0)) - start
    typical = median(seconds for _, _, seconds in spans)
    count = max(1, min(_MOST, int(seconds / max(typical, 1e-3))))
    return Timeline(start, seconds / count, count)
