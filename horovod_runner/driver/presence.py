"""Which tasks of an attempt are there, and which are lost."""

from __future__ import annotations

from collections.abc import Iterable

from horovod_runner.common.limits import Limits
from horovod_runner.driver.launcher import Launch
from horovod_runner.driver.liveness import Liveness
from horovod_runner.wire.channel import Channel


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
