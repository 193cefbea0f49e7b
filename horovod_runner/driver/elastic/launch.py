"""One attempt on members of a pool, as its supervisor sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from horovod_runner.driver.launcher import Launch, TaskLostError
from horovod_runner.errors import LaunchError
from horovod_runner.wire.job import Outcome

if TYPE_CHECKING:
    from horovod_runner.driver.elastic.pool import Pool


class PooledLaunch(Launch):
    """One attempt on members of a pool."""

    def __init__(
        self, pool: Pool, seats: Mapping[int, int], wake: Callable[[], None], patience: float
    ) -> None:
        self._pool = pool
        self._seats = dict(seats)
        self._wake = wake
        self._patience = patience
        self._outcomes: dict[int, Outcome] = {}
        self._reasons: dict[int, str] = {}  # of the tasks whose members are lost
        self.expected = time.monotonic() + patience

    def late_error(self) -> LaunchError:
        """See :class:`~horovod_runner.driver.launcher.Launch`."""
        return LaunchError(
            f"no task has reported within {self._patience:g} s, although the tasks are there: "
            "their hosts may be overloaded, or a firewall may be between them and the driver."
        )

    def outcomes(self) -> list[Outcome]:
        """See :class:`~horovod_runner.driver.launcher.Launch`."""
        for task, reason in sorted(self._reasons.items()):
            raise TaskLostError(task, reason)
        return list(self._outcomes.values())

    def cancel(self) -> None:
        """Do without the tasks that have not ended; the others wait for the next attempt."""
        self._pool.give_up(self)

    @property
    def unfinished(self) -> list[int]:
        """The seats of tasks that have no outcome and are not lost."""
        ended = self._outcomes.keys() | self._reasons.keys()
        return [seat for task, seat in self._seats.items() if task not in ended]

    def done(self, outcome: Outcome) -> None:
        """Record a task's outcome."""
        self._outcomes[outcome.task] = outcome
        self._changed()

    def lose(self, seat: int, reason: str) -> None:
        """Record that the member of a seat is lost."""
        for task in self._working(seat):
            self._reasons[task] = reason
            self.lost = list(self._reasons)
            self._changed()

    def end(self, seat: int, reason: str) -> None:
        """Record that the member of a seat is about to end; its rank is still waited for."""
        for task in self._working(seat):
            self.problem = LaunchError(f"task {task} of {len(self._seats)}: {reason}")
            self._changed()

    def _working(self, seat: int) -> list[int]:
        ended = self._outcomes.keys()
        return [task for task, of in self._seats.items() if of == seat and task not in ended]

    def _changed(self) -> None:
        self.finished = len(self._outcomes) + len(self._reasons) >= len(self._seats)
        self._wake()
