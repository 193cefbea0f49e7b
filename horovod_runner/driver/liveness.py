"""Detects lost tasks: those that have sent nothing for several ticks. Pure.

Silence is counted in ticks of the supervisor, not in seconds: a supervisor that was itself
suspended has not ticked meanwhile, and blames nobody.
"""

from __future__ import annotations

import math


class Liveness:
    """Counts for how many ticks tasks have been silent; a live one sends something every tick.

    Args:
        silent: a task is lost when it has been silent for so many ticks.
        suspect: the same after a broken connection.
    """

    def __init__(self, silent: float, suspect: float) -> None:
        self._silent = silent
        self._suspect = math.ceil(suspect)
        self._silence: dict[int, int] = {}
        self._left: set[int] = set()
        self._look_in = 0

    def heard(self, task: int) -> None:
        """Record a message from a task."""
        if task not in self._left:
            self._silence[task] = 0

    def leave(self, task: int) -> None:
        """Stop expecting messages from a task: it has ended, or is known to be lost."""
        self._left.add(task)
        self._silence.pop(task, None)

    def returned(self, task: int) -> None:
        """Expect messages again from a task that had left."""
        self._left.discard(task)
        self._silence[task] = 0

    def suspect(self) -> None:
        """Record a broken connection: a task that is silent from now on is soon counted as lost."""
        self._look_in = self._look_in or self._suspect

    @property
    def suspicious(self) -> bool:
        """Whether a broken connection has not been explained yet."""
        return self._look_in > 0

    @property
    def present(self) -> bool:
        """Whether messages from any task are expected."""
        return bool(self._silence)

    def most_silent(self) -> list[int]:
        """The tasks that have been silent for longest."""
        longest = max(self._silence.values(), default=0)
        return [task for task, ticks in self._silence.items() if ticks == longest]

    def tick(self) -> list[int]:
        """Count one tick; returns the tasks that are lost with it and no longer expected."""
        limit = self._silent
        if self._look_in:
            self._look_in -= 1
            limit = limit if self._look_in else self._suspect
        for task in self._silence:
            self._silence[task] += 1
        lost = [task for task, ticks in self._silence.items() if ticks >= limit]
        for task in lost:
            self.leave(task)
        return lost
