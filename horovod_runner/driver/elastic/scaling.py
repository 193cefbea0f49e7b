"""Decides how many ranks an attempt of an elastic run has. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingPolicy:
    """A range of ranks, and when an attempt ends in favour of another number of them.

    Attributes:
        grow_after: the least number of seconds between the start of an attempt and its end in
            favour of one with more ranks.
        slot_timeout: seconds in which the first attempt waits for ``most`` tasks. None waits for
            those that the cluster has slots for.
    """

    least: int
    most: int
    grow_after: float = 60.0
    slot_timeout: float | None = None

    def first_size(self, expected: int | None) -> int:
        """For how many tasks the first attempt waits; as many as are expected soon, where known."""
        if self.slot_timeout or expected is None:
            return self.most
        return min(self.most, max(self.least, expected))

    def ends_attempt(self, size: int, more: int, leaving: bool, seconds: float) -> bool:
        """Whether the ranks of an attempt are to leave at their next commit.

        It began some seconds ago with ``size`` ranks. ``more`` tasks, which have no part in it,
        wait for work. ``leaving`` says whether a rank's executor is about to go.
        """
        grows = size < self.most and more > 0
        return leaving or (grows and seconds >= self.grow_after)
