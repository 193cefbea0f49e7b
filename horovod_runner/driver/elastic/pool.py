"""The driver's side of a pool of tasks: who is there, what they do, what they have done.

A separate thread exchanges messages with the tasks (launchers/member.py) and counts their
heartbeats. The thread of the run asks for members, and launches attempts on them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

from horovod_runner.driver.elastic.members import Member, Members
from horovod_runner.driver.liveness import Liveness
from horovod_runner.errors import HorovodRunnerError, LaunchError
from horovod_runner.launchers.launcher import (
    JobCancelledError,
    LaunchRequest,
    MemberTasks,
    PoolRequest,
    TaskLostError,
)
from horovod_runner.wire import messages
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.job import Job, Outcome, decode_outcome
from horovod_runner.wire.pool import Change, Done, Joined, Work

_TICK_SECONDS = 1.0
_MOST_GONE = 1000  # a task of these may still say for some seconds that it is there


class PooledLaunch:
    """One attempt on members of a pool.

    Args:
        seats: the seat of each task.
        wake: called when something has changed.
        give_up: lets the pool do without the members of the seats that its argument returns.
        patience: seconds to wait for the first task to report.
    """

    running = False
    task_0 = None

    def __init__(
        self,
        seats: Mapping[int, int],
        wake: Callable[[], None],
        give_up: Callable[[Callable[[], Collection[int]]], None],
        patience: float,
    ) -> None:
        self._patience = patience
        self._seats = dict(seats)
        self._wake = wake
        self._give_up = give_up
        self._outcomes: dict[int, Outcome] = {}
        self._reasons: dict[int, str] = {}
        self.problem: LaunchError | None = None
        self.expected: float | None = time.monotonic() + patience

    @property
    def late_error(self) -> HorovodRunnerError:
        """The error to raise if no task has said Hello in time."""
        return LaunchError(
            f"no task has reported within {self._patience:g} s, although the tasks are there: "
            "their hosts may be overloaded, or a firewall may be between them and the driver."
        )

    @property
    def lost(self) -> list[int]:
        """The tasks whose members are lost."""
        return list(self._reasons)

    @property
    def finished(self) -> bool:
        """Whether all tasks have an outcome, or are lost."""
        return len(self._outcomes) + len(self._reasons) >= len(self._seats)

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended.

        Raises:
            TaskLostError: a member was lost.
        """
        for task, reason in sorted(self._reasons.items()):
            raise TaskLostError(task, reason)
        return list(self._outcomes.values())

    def cancel(self) -> None:
        """Do without the tasks that have not ended; the others wait for the next attempt."""
        self._give_up(self._unfinished)

    def _unfinished(self) -> list[int]:
        """The seats of tasks that have no outcome and are not lost."""
        ended = self._outcomes.keys() | self._reasons.keys()
        return [seat for task, seat in self._seats.items() if task not in ended]

    def done(self, outcome: Outcome) -> None:
        """Take in a task's outcome."""
        self._outcomes[outcome.task] = outcome
        self._wake()

    def lose(self, seat: int, reason: str) -> None:
        """Take in that the member of a seat is lost."""
        for task in self._working(seat):
            self._reasons[task] = reason
            self._wake()

    def end(self, seat: int, reason: str) -> None:
        """Take in that the member of a seat is about to end. Its rank is still to be waited for."""
        for task in self._working(seat):
            self.problem = LaunchError(f"task {task} of {len(self._seats)}: {reason}")
            self._wake()

    def _working(self, seat: int) -> list[int]:
        """The tasks of a seat that have no outcome."""
        ended = self._outcomes.keys()
        return [task for task, of in self._seats.items() if of == seat and task not in ended]


class Pool:
    """The tasks of a run; use it as a context.

    Args:
        host: the driver's address as the tasks reach it.
        most: how many ranks the run may have.
        grow_after: see :class:`~horovod_runner.driver.elastic.members.Members`.
        launch: starts the tasks.
        job: the run's.

    Attributes:
        changed: notified when a member has come, gone, or waits again.
        committed: the furthest step of any commit, as of the end of the last attempt; -1 if there
            is none.
        problem: why the latest task could not be started; None if all could.
        cancelled: the seats that stay empty because their Spark jobs were cancelled.
    """

    def __init__(
        self,
        host: str,
        most: int,
        grow_after: float,
        launch: Callable[[PoolRequest], MemberTasks],
        job: Job,
    ) -> None:
        self._job = job
        self._limits = limits = job.limits
        self._host = host
        self._most = most
        self._start_tasks = launch
        self.changed = threading.Condition()
        self.committed = -1
        self._members = Members(most, grow_after)
        self._liveness = Liveness(limits.silent_task, limits.reconnect_task)
        self._broken = 0
        self._orders: dict[int, Work] = {}
        self._launch: PooledLaunch | None = None
        self.problem: LaunchError | None = None
        self.cancelled: dict[int, JobCancelledError] = {}
        self._cancelled_at = -math.inf
        self._seen: dict[int, int] = {}  # when the latest member of a seat began
        # The latest tasks that have ended: seat, and when they began.
        self._gone: deque[tuple[int, int]] = deque(maxlen=_MOST_GONE)
        self._over = False

    def __enter__(self) -> Pool:
        self._channel = Channel(self._host, self._most, self._limits)
        try:
            self._tasks = self._start_tasks(
                PoolRequest(self._job, self._most, self._channel.address, self._ended, self._leave)
            )
        except BaseException:
            self._channel.close()
            raise
        self._thread = threading.Thread(target=self._work, name="horovod_runner-pool", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self._over = True
        self._channel.wake()
        self._thread.join()
        self._tasks.close(self._members.seats, self._limits.pool_end)
        self._channel.close()

    def ready(self) -> int:
        """How many members wait for work. Call it with :attr:`changed` held.

        Raises:
            LaunchError: a task could not be started, and none has been before.
        """
        if self.problem is not None and not self._seen:
            raise self.problem
        return len(self._members.ready)

    @property
    def settled(self) -> bool:
        """Whether no other job was cancelled together with the latest one, as far as can be told.

        Call it with :attr:`changed` held.
        """
        if not self.cancelled:
            return True
        waited = time.monotonic() - self._cancelled_at
        return waited >= self._limits.cancelled_tasks and self._tasks.settled()

    def launch(self, request: LaunchRequest) -> PooledLaunch:
        """Begin an attempt.

        Raises:
            LaunchError: a member has been lost since it was counted.
        """
        job = request.job
        with self.changed:
            if len(self._members.ready) < job.size:
                raise LaunchError(
                    f"{job.size - len(self._members.ready)} of {job.size} tasks were lost before "
                    f"attempt {job.attempt} began"
                )
            chosen = self._members.start(job.attempt, job.size)
            seats = {task: member.seat for task, member in enumerate(chosen)}
            self._launch = PooledLaunch(
                seats, request.wake, self._give_up, self._limits.pool_report
            )
            self._orders = {
                seat: Work(task, job.size, job.attempt, job.checkpoints, request.address)
                for task, seat in seats.items()
            }
        self._channel.wake()
        return self._launch

    def _give_up(self, seats: Callable[[], Collection[int]]) -> None:
        """Do without the members of these seats until they report again."""
        with self.changed:
            for seat in seats():  # asked here: an outcome may come at any time
                self._lose(seat, "it has not ended, although it was told to")
            self.changed.notify_all()

    def _leave(self, seat: int, reason: str) -> None:
        """A member's executor is about to go: do without it from the next commit on."""
        with self.changed:
            self._members.leave(seat, reason)
        self._channel.wake()

    def _ended(self, seat: int, error: LaunchError) -> None:
        """A task has ended against the pool's will; see PoolKeeper."""
        with self.changed:
            if seat in self._seen:
                self._gone.append((seat, self._seen[seat]))
            if isinstance(error, JobCancelledError):
                self.cancelled[seat] = error
                self._cancelled_at = time.monotonic()
                # Spark kills its process some seconds later. Until then its rank can be ended.
                self._members.leave(seat, str(error))
                if self._launch is not None:
                    self._launch.end(seat, str(error))
            else:
                if seat not in self._seen:
                    self.problem = error
                self._lose(seat, str(error))
            self.changed.notify_all()

    def _work(self) -> None:
        tick_at = time.monotonic() + _TICK_SECONDS
        while not self._over:
            self._send_orders()
            for seat, batch in self._channel.batches(max(0.0, tick_at - time.monotonic())):
                with self.changed:
                    self._liveness.heard(seat)
                    for message in batch:
                        self._handle(seat, message)
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_SECONDS
                self._tick()
        self._channel.send_all(range(self._most), messages.Stop("the run is over"))

    def _send_orders(self) -> None:
        with self.changed:
            orders, self._orders = self._orders, {}
            attempt = self._members.change()
            working = [member.seat for member in self._members.working]
            leaving = self._members.gone()
        for seat, work in orders.items():
            self._channel.send(seat, work)
        for seat in leaving:
            self._channel.send(seat, messages.Stop("its executor is about to go"))
        if attempt:
            self._channel.send_all(working, Change(attempt))

    def _handle(self, seat: int, message: messages.FromRank) -> None:
        match message:
            case Joined():
                self._on_joined(seat, message)
            case Done():
                self.committed = max(self.committed, message.committed)
                if self._members.finish(seat, message.attempt) and self._launch is not None:
                    outcome = decode_outcome(message.outcome)
                    self._launch.done(outcome)
                    self.changed.notify_all()
                self._channel.send(seat, messages.Taken())
            case messages.Alive():
                pass
            case _:
                self._channel.dropped += 1

    def _on_joined(self, seat: int, message: Joined) -> None:
        if (seat, message.began) in self._gone:
            # Spark kills the process of a cancelled task some seconds after the task.
            self._channel.send(seat, messages.Stop("its task has ended"))
            return
        known = self._members.find(seat)
        if known is None or known.began != message.began:
            self._lose(seat, "its task was started again")
            self._seen[seat] = message.began
            self._liveness.returned(seat)
            self._members.join(Member(seat, message.began))
            self.changed.notify_all()

    def _lose(self, seat: int, reason: str) -> None:
        self._members.lose(seat)
        if self._launch is not None:
            self._launch.lose(seat, reason)

    def _tick(self) -> None:
        """Once a second: is every member still there?"""
        with self.changed:
            if self._channel.broken > self._broken:
                self._broken = self._channel.broken
                self._liveness.suspect()
            for seat in self._liveness.tick():
                self._lose(seat, "its task has sent nothing for several seconds")
            self.changed.notify_all()
