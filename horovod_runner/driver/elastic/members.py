"""Who belongs to a pool, and who works. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from horovod_runner.driver.elastic.scaling import ScalingPolicy


@dataclass
class PoolMember:
    """A task of the pool.

    Attributes:
        began: tells the task from an earlier one in the same seat.
        leaving: why it is to take part in no further attempt; empty if it is not.
    """

    seat: int
    began: int
    attempt: int = 0
    leaving: str = ""


class Members:
    """The members of a pool."""

    def __init__(self, scaling: ScalingPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._scaling = scaling
        self._clock = clock
        self._members: dict[int, PoolMember] = {}  # in the order in which they came
        self._attempt = self._size = 0
        self._started = 0.0
        self._asked = 0  # the attempt whose ranks were asked to leave

    def find(self, seat: int) -> PoolMember | None:
        """The member of a seat; None while the seat is empty."""
        return self._members.get(seat)

    def join(self, member: PoolMember) -> None:
        """Add a member; the one who had its seat is gone."""
        self.lose(member.seat)
        self._members[member.seat] = member

    def lose(self, seat: int) -> None:
        """Remove the member of a seat."""
        self._members.pop(seat, None)

    def leave(self, seat: int, reason: str) -> None:
        """Let a member take part in no further attempt."""
        member = self._members.get(seat)
        if member is not None and not member.leaving:
            member.leaving = reason

    @property
    def seats(self) -> list[int]:
        """The seats that have a member."""
        return list(self._members)

    @property
    def ready(self) -> list[PoolMember]:
        """The members that wait for work, those that came first first."""
        return [m for m in self._members.values() if not m.attempt and not m.leaving]

    @property
    def working(self) -> list[PoolMember]:
        """The members that work."""
        return [member for member in self._members.values() if member.attempt]

    def start(self, attempt: int, size: int) -> list[PoolMember]:
        """Choose the members of an attempt, by the number of their task.

        Those that came first come first: they have the commits of earlier attempts.
        """
        chosen = self.ready[:size]
        for member in chosen:
            member.attempt = attempt
        self._attempt, self._size, self._started = attempt, len(chosen), self._clock()
        return chosen

    def finish(self, seat: int, attempt: int) -> bool:
        """Let a member wait again; False if it did not work in this attempt."""
        member = self._members.get(seat)
        if member is None or member.attempt != attempt:
            return False
        member.attempt = 0
        return True

    def gone(self) -> list[int]:
        """The seats of members that are leaving and no longer work. They are removed."""
        leaving = [m.seat for m in self._members.values() if m.leaving and not m.attempt]
        for seat in leaving:
            self.lose(seat)
        return leaving

    def change(self) -> int:
        """The attempt whose ranks are to leave at their next commit, once; 0 for none."""
        working = [member for member in self.working if member.attempt == self._attempt]
        if not working or self._asked == self._attempt:
            return 0
        leaving = any(member.leaving for member in working)
        # Where a rank has returned, the others soon will, and its own task is ready again.
        more = len(self.ready) if len(working) == self._size else 0
        seconds = self._clock() - self._started
        if self._scaling.ends_attempt(self._size, more, leaving, seconds):
            self._asked = self._attempt
            return self._attempt
        return 0
