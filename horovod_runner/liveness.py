"""Which tasks are still there: those that were heard of lately. Pure; the driver gives the beat.

Silence is counted in ticks of the driver, not in seconds: a driver that was itself suspended has
ticked no more than it has listened.
"""

from __future__ import annotations

_LOST_TICKS = 12  # a network may be away for that long
_SUSPECT_TICKS = 4  # after a connection broke off: a live task is back at once


class Liveness:
    """Counts the silence of tasks, each of which sends at least one message a tick."""

    def __init__(self) -> None:
        self._silence: dict[int, int] = {}
        self._left: set[int] = set()
        self._look_in = 0

    def heard(self, task: int) -> None:
        """A message came from a task."""
        if task not in self._left:
            self._silence[task] = 0

    def leave(self, task: int) -> None:
        """A task has said its last word: it is waited for no more."""
        self._left.add(task)
        self._silence.pop(task, None)

    def suspect(self) -> None:
        """A connection broke off: whoever is silent from now on is soon taken for lost."""
        self._look_in = self._look_in or _SUSPECT_TICKS

    @property
    def suspicious(self) -> bool:
        """Whether a broken connection has yet to be explained."""
        return self._look_in > 0

    @property
    def present(self) -> bool:
        """Whether there is any task left."""
        return bool(self._silence)

    def most_silent(self) -> list[int]:
        """The tasks that were not heard of for longest."""
        longest = max(self._silence.values(), default=0)
        return [task for task, ticks in self._silence.items() if ticks == longest]

    def tick(self) -> list[int]:
        """Count one tick; returns the tasks that are lost with it, which are counted no more."""
        limit = _LOST_TICKS
        if self._look_in:
            self._look_in -= 1
            limit = limit if self._look_in else _SUSPECT_TICKS
        for task in self._silence:
            self._silence[task] += 1
        lost = [task for task, ticks in self._silence.items() if ticks >= limit]
        for task in lost:
            self.leave(task)
        return lost
