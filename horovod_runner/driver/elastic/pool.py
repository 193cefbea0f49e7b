"""The launcher of an elastic run: each attempt takes the tasks of the pool that are there.

A separate thread exchanges messages with the tasks (launchers/member.py) and counts their
heartbeats. The thread of the run asks for members, and launches attempts on them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from horovod_runner.common.threads import start_thread
from horovod_runner.driver.elastic.launch import PooledLaunch
from horovod_runner.driver.elastic.members import Members, PoolMember
from horovod_runner.driver.elastic.scaling import ScalingPolicy
from horovod_runner.driver.launcher import (
    JobCancelledError,
    Launcher,
    LaunchRequest,
    PoolKeeper,
    PoolRequest,
)
from horovod_runner.driver.liveness import Liveness
from horovod_runner.errors import (
    CancelledError,
    DataError,
    LaunchError,
    SlotError,
)
from horovod_runner.wire import messages
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.job import Job, decode_outcome
from horovod_runner.wire.pool import Change, Done, Joined, Work

_TICK_SECONDS = 1.0
_MOST_GONE = 1000  # a task of these may still say for some seconds that it is there


class Pool(Launcher):
    """The tasks of a run, on which attempts are launched; a context, which starts and ends them.

    Attributes:
        changed: notified when a member has come, gone, or waits again.
        committed: the furthest step of any commit, as of the end of the last attempt; -1 if there
            is none.
    """

    def __init__(
        self,
        launcher: PoolKeeper,
        job: Job,
        scaling: ScalingPolicy,
        notice: Callable[[str], None],
        cancelled: threading.Event,
    ) -> None:
        self.where = launcher.where
        self.channel_host = launcher.channel_host
        self._launcher = launcher
        self._job = job
        self._limits = limits = job.limits
        self._scaling = scaling
        self._notice = notice
        self._run_cancelled = cancelled
        self._first = True
        self.changed = threading.Condition()
        self.committed = -1
        self._members = Members(scaling)
        self._liveness = Liveness(limits.silent_task, limits.reconnect_task)
        self._broken = 0
        self._orders: dict[int, Work] = {}
        self._launch: PooledLaunch | None = None
        self._problem: LaunchError | None = None  # why the latest task could not be started
        # The seats that stay empty because their Spark jobs were cancelled.
        self._cancelled: dict[int, JobCancelledError] = {}
        self._cancelled_at = -math.inf
        self._seen: dict[int, int] = {}  # when the latest member of a seat began
        # The latest tasks that have ended: seat, and when they began.
        self._gone: deque[tuple[int, int]] = deque(maxlen=_MOST_GONE)
        self._over = False

    def __enter__(self) -> Pool:
        most = self._scaling.most
        self._channel = Channel(self.channel_host, most, self._limits)
        try:
            self._tasks = self._launcher.launch_members(
                PoolRequest(self._job, most, self._channel.address, self._ended, self._leave)
            )
        except BaseException:
            self._channel.close()
            raise
        self._thread = start_thread("pool", self._work)
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self._over = True
        self._channel.wake()
        self._thread.join()
        try:
            self._tasks.close(self._members.seats, self._limits.pool_end)
        finally:
            self._channel.close()

    @property
    def cancelled(self) -> LaunchError | None:
        """Why too few tasks can come: somebody cancelled their Spark jobs. None: enough can."""
        cancelled = list(self._cancelled.values())
        enough = self._scaling.most - len(cancelled) >= self._scaling.least
        return None if enough else cancelled[-1]

    def slots(self, size: int, patience: float = 0.0) -> int:
        """Wait for tasks; returns how many ranks the next attempt has.

        The first attempt waits for all tasks that are expected; later ones take what is there.

        Raises:
            SlotError: there are fewer than the least number.
            LaunchError: tasks could not be started, or their Spark jobs were cancelled.
            CancelledError: the run was cancelled.
        """
        began, limits, scaling = time.monotonic(), self._limits, self._scaling
        seconds = max(patience, scaling.slot_timeout or limits.pool_slots)
        wanted = scaling.least
        if self._first:
            wanted = scaling.first_size(self._launcher.expected_tasks())
        full_until = began + (scaling.slot_timeout or limits.pool_tasks)
        noticed = began
        with self.changed:
            while True:
                ready, now = self.ready(), time.monotonic()
                enough = ready >= wanted or (ready >= scaling.least and now >= full_until)
                if enough and self._settled():
                    self._first = False
                    return min(ready, scaling.most)
                if now - began >= seconds and ready < scaling.least:
                    raise self._too_few(ready, seconds)
                if (cancelled := self.cancelled) is not None:
                    raise cancelled
                if self._run_cancelled.is_set():
                    raise CancelledError("the run was cancelled while it waited for slots")
                if now - noticed > limits.slot_notice:
                    noticed = now
                    self._notice(f"waiting for slots: {ready} of {wanted}")
                self.changed.wait(0.2)

    def _too_few(self, ready: int, seconds: float) -> SlotError:
        text = (
            f"the run needs at least {self._scaling.least} slot(s), and {self.where} has {ready} "
            f"after {seconds:g} s. Lower the least number of ranks, np=({max(1, ready)}, "
            f"{self._scaling.most}), or raise slot_timeout if executors may still come."
        )
        if why := self._launcher.why_missing():
            text += f" {why}"
        if self._problem is not None:
            text += f" Tasks that could not be started: {self._problem}"
        if not ready:
            text += (
                " If Spark shows running tasks of this run, they cannot reach the driver at "
                f"{self.channel_host}: let their TCP connections through. Without dynamic "
                "allocation, np as one number needs no such connection (docs/where/networks.md)."
            )
        return SlotError(text)

    def ready(self) -> int:
        """How many members wait for work. Call it with :attr:`changed` held.

        Raises:
            LaunchError: a task could not be started, and none has been before.
        """
        if self._problem is not None and not self._seen:
            raise self._problem
        return len(self._members.ready)

    def _settled(self) -> bool:
        """Whether no other job was cancelled together with the latest one, as far as can be told.

        Call it with :attr:`changed` held.
        """
        if not self._cancelled:
            return True
        waited = time.monotonic() - self._cancelled_at
        return waited >= self._limits.cancelled_tasks and self._tasks.settled()

    def launch(self, request: LaunchRequest) -> PooledLaunch:
        """Begin an attempt on the tasks that came first. There are no DataFrames here.

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
            self._launch = PooledLaunch(self, seats, request.wake, self._limits.pool_report)
            self._orders = {
                seat: Work(task, job.size, job.attempt, job.checkpoints, request.address)
                for task, seat in seats.items()
            }
        self._channel.wake()
        return self._launch

    def give_up(self, launch: PooledLaunch) -> None:
        """Do without the members that have not ended until they report again."""
        with self.changed:
            for seat in launch.unfinished:  # asked here: an outcome may come at any time
                self._lose(seat, "it has not ended, although it was told to")
            self.changed.notify_all()

    def _leave(self, seat: int, reason: str) -> None:
        """A member's executor is about to go: do without it from the next commit on."""
        with self.changed:
            self._members.leave(seat, reason)
        self._channel.wake()

    def _ended(self, seat: int, error: LaunchError) -> None:
        """A task has ended that the pool has not told to; see PoolRequest."""
        with self.changed:
            if seat in self._seen:
                self._gone.append((seat, self._seen[seat]))
            if isinstance(error, JobCancelledError):
                self._cancelled[seat] = error
                self._cancelled_at = time.monotonic()
                # Spark kills its process some seconds later. Until then its rank can be ended.
                self._members.leave(seat, str(error))
                if self._launch is not None:
                    self._launch.end(seat, str(error))
            else:
                if seat not in self._seen:
                    self._problem = error
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
        self._channel.send_all(range(self._scaling.most), messages.Stop("the run is over"))

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
            self._members.join(PoolMember(seat, message.began))
            self.changed.notify_all()

    def _lose(self, seat: int, reason: str) -> None:
        self._members.lose(seat)
        if self._launch is not None:
            self._launch.lose(seat, reason)

    def _tick(self) -> None:
        with self.changed:
            if self._channel.broken > self._broken:
                self._broken = self._channel.broken
                self._liveness.suspect()
            for seat in self._liveness.tick():
                self._lose(seat, "its task has sent nothing for several seconds")
            self.changed.notify_all()


def refuse_dataframes(dataframes: Mapping[str, Any]) -> None:
    """Raise DataError where there are DataFrames: they cannot be an elastic run's."""
    if dataframes:
        raise DataError(
            f"{', '.join(dataframes)}: the rows of a DataFrame go to the ranks' own disks, so "
            "which rank has which depends on the number of ranks, and this run may change it. "
            "Name a folder that the driver and all executors share, "
            "data_config=DataConfig(shared_dir=...), or write the DataFrame to Parquet there."
        )
