"""The launcher of an elastic run: each attempt takes the tasks of the pool that are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from horovod_runner.driver.elastic.pool import Pool, PooledLaunch
from horovod_runner.errors import CancelledError, LaunchError, SlotError
from horovod_runner.launchers.launcher import LaunchRequest, PoolKeeper
from horovod_runner.wire.job import Job


class PooledLauncher:
    """Launches attempts on the tasks of a pool; a context, which starts and ends them.

    Args:
        launcher: starts the tasks.
        job: the run's.
        least: an attempt has at least so many ranks.
        most: and at most so many.
        grow_after: see :class:`~horovod_runner.driver.elastic.members.Members`.
        slot_timeout: seconds in which the first attempt waits for ``most`` tasks. None waits for
            those that the cluster has slots for.
        notice: called with a line for the user.
        cancelled: ends the wait for tasks when it is set.
    """

    def __init__(
        self,
        launcher: PoolKeeper,
        job: Job,
        *,
        least: int,
        most: int,
        grow_after: float,
        slot_timeout: float | None,
        notice: Callable[[str], None],
        cancelled: threading.Event,
    ) -> None:
        self.where = launcher.where
        self.channel_host = launcher.channel_host
        self.shares_files = launcher.shares_files
        self._launcher = launcher
        self._least = least
        self._most = most
        self._slot_timeout = slot_timeout
        self._notice = notice
        self._cancelled = cancelled
        self._first = True
        self._limits = job.limits
        start = launcher.launch_members
        self._pool = Pool(launcher.channel_host, most, grow_after, start, job)

    def __enter__(self) -> PooledLauncher:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    @property
    def committed(self) -> int:
        """The furthest step of any commit, as of the end of the last attempt; -1 for none."""
        return self._pool.committed

    @property
    def cancelled(self) -> LaunchError | None:
        """Why too few tasks can come: somebody cancelled their Spark jobs. None: enough can."""
        cancelled = list(self._pool.cancelled.values())
        return cancelled[-1] if self._most - len(cancelled) < self._least else None

    def slots(self, size: int, patience: float = 0.0) -> int:
        """Wait for tasks; returns how many ranks the next attempt has.

        The first attempt waits for all tasks that are expected; later ones take what is there.

        Raises:
            SlotError: there are fewer than the least number.
            LaunchError: tasks could not be started, or their Spark jobs were cancelled.
            CancelledError: the run was cancelled.
        """
        began, limits = time.monotonic(), self._limits
        wanted, seconds = self._least, max(patience, self._slot_timeout or limits.pool_slots)
        if self._first:
            expected = self._launcher.expected_tasks()
            wanted = self._most if self._slot_timeout or expected is None else expected
            wanted = min(self._most, max(self._least, wanted))
        full_until = began + (self._slot_timeout or limits.pool_tasks)
        noticed = began
        with self._pool.changed:
            while True:
                ready, now = self._pool.ready(), time.monotonic()
                enough = ready >= wanted or (ready >= self._least and now >= full_until)
                if enough and self._pool.settled:
                    self._first = False
                    return min(ready, self._most)
                if now - began >= seconds and ready < self._least:
                    raise self._too_few(ready, seconds)
                if (cancelled := self.cancelled) is not None:
                    raise cancelled
                if self._cancelled.is_set():
                    raise CancelledError("the run was cancelled while it waited for slots")
                if now - noticed > limits.slot_notice:
                    noticed = now
                    self._notice(f"waiting for slots: {ready} of {wanted}")
                self._pool.changed.wait(0.2)

    def _too_few(self, ready: int, seconds: float) -> SlotError:
        problem = self._pool.problem
        return SlotError(
            f"the run needs at least {self._least} slot(s), and {self.where} has {ready} after "
            f"{seconds:g} s. Lower the least number of ranks, np=({max(1, ready)}, "
            f"{self._most}), or raise slot_timeout if executors may still come."
            + ("" if problem is None else f" Tasks that could not be started: {problem}")
            + ("" if ready else self._perhaps_unreached())
        )

    def _perhaps_unreached(self) -> str:
        return (
            " If Spark shows running tasks of this run, they cannot reach the driver at "
            f"{self.channel_host}: let their TCP connections through. Without dynamic allocation, "
            "np as one number needs no such connection (docs/where/networks.md)."
        )

    def launch(self, request: LaunchRequest) -> PooledLaunch:
        """Begin an attempt on the tasks that came first.

        There are no DataFrames here: see :func:`refuse_dataframes`.

        Raises:
            LaunchError: a task was lost.
        """
        return self._pool.launch(request)


def refuse_dataframes(dataframes: Mapping[str, Any]) -> str:
    """Why these DataFrames cannot be an elastic run's."""
    return (
        f"{', '.join(dataframes)}: the rows of a DataFrame go to the ranks' own disks, so which "
        "rank has which depends on the number of ranks, and this run may change it. Name a folder "
        "that the driver and all executors share, data_config=DataConfig(shared_dir=...), or write "
        "the DataFrame to Parquet there."
    )
