"""Detects lost tasks: those that have sent nothing for several ticks.

Silence is counted in ticks of the supervisor, not in seconds: a supervisor that was itself
suspended has not ticked meanwhile, and blames nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from horovod_runner.common.limits import Limits
from horovod_runner.driver.launcher import Launch
from horovod_runner.wire.channel import Channel


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


class Presence(Liveness):
    """The tasks of one attempt, as far as their messages and their launcher tell."""

    def __init__(self, channel: Channel, launch: Launch, limits: Limits) -> None:
        super().__init__(limits.silent_task, limits.reconnect_task)
        self._channel = channel
        self._launch = launch
        self.lost: set[int] = set()
        self._ended = 0  # tasks that have sent their last message
        self._unexplained = 0  # broken connections of tasks that had not

    def ended(self, task: int) -> None:
        """Record the last message of a task."""
        self._ended += 1
        self.leave(task)

    def lose(self, tasks: Iterable[int]) -> None:
        """Record that tasks are lost: they send nothing more."""
        for task in tasks:
            self.lost.add(task)
            self.leave(task)

    def told(self) -> list[int]:
        """The tasks that the launcher has found to be lost since the last call."""
        return [task for task in self._launch.lost if task not in self.lost]

    def tick(self) -> list[int]:
        """Count a second; returns the tasks that have been silent for too long with it."""
        # A task that ends closes its connection. Any other end of a connection is unexplained.
        if self._channel.broken - self._ended > self._unexplained:
            self._unexplained = self._channel.broken - self._ended
            self.suspect()
        return super().tick()
