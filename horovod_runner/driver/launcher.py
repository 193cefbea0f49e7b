"""What the driver asks of a launcher, and the base classes of launchers and of their launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod_runner.errors import HorovodRunnerError, LaunchError
from horovod_runner.wire.addresses import Call, ChannelAddress
from horovod_runner.wire.job import Job, Outcome


class TaskLostError(LaunchError):
    """A task ended without an outcome; the error has the task's number."""

    def __init__(self, task: int, reason: str) -> None:
        super().__init__(reason)
        self.task = task


class LaunchLostError(LaunchError):
    """The system that had launched the ranks ended, and all ranks with it."""


class JobCancelledError(LaunchError):
    """Somebody cancelled the Spark job of the ranks: they are not launched again."""


@dataclass(frozen=True)
class LaunchRequest:
    """What a launcher is asked to start.

    Attributes:
        wake: called, from any thread, when the launch has finished.
        dataframes: Spark DataFrames whose rows are sent to the tasks with the launch, by dataset
            name. Empty unless the ranks may be on other machines and share no folder with the
            driver.
    """

    job: Job
    address: ChannelAddress
    wake: Callable[[], None]
    dataframes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolRequest:
    """The tasks of a pool that a launcher is asked to start.

    Attributes:
        ended: called, from any thread, with the seat and the reason when a task ends that the pool
            has not told to; another one is started in its place, except after a JobCancelledError.
        leaving: called, from any thread and perhaps repeatedly, with the seat and the reason when a
            task's executor is about to go. The pool tells the task to end.
    """

    job: Job
    seats: int
    address: ChannelAddress
    ended: Callable[[int, LaunchError], None]
    leaving: Callable[[int, str], None]


class Launch(ABC):
    """One launch of all ranks, under way.

    Attributes:
        finished: whether all ranks have ended.
        running: whether all tasks are known to run, and can switch to detached mode.
        expected: by when a task should have said Hello, in seconds of the monotonic clock; None:
            never.
        problem: what the launcher itself failed with, so that the ranks must end; None: nothing.
        lost: tasks that are known to be lost while others run; the rest shows by silence.
        task_0: the host of task 0, and how to call a stand-in there; None if that is not known.
    """

    finished = False
    running = False
    expected: float | None = None
    problem: HorovodRunnerError | None = None
    lost: Sequence[int] = ()
    task_0: tuple[str, Call] | None = None

    def late_error(self) -> HorovodRunnerError | None:
        """The error to raise if no task has said Hello by :attr:`expected`."""
        return None

    @abstractmethod
    def outcomes(self) -> list[Outcome]:
        """How the ranks ended, one outcome each, in any order. Call it once finished.

        Raises:
            TaskLostError: a task was lost (its executor was killed).
            LaunchLostError: all tasks were lost.
            JobCancelledError: somebody cancelled the Spark job.
            LaunchError: the launcher itself failed.
        """

    def cancel(self) -> None:  # noqa: B027 - not all need it
        """End ranks that the driver's messages no longer reach; the others get its Stop."""


class MemberTasks(ABC):
    """The tasks of a pool (launchers/member.py), one in each seat. One that ends starts again."""

    def settled(self) -> bool:
        """Whether all ends of tasks that the system knows of have been reported to the pool."""
        return True

    @abstractmethod
    def close(self, served: Collection[int], seconds: float) -> None:
        """Wait for the tasks that the pool has told to end; call off the others.

        The tasks of ``served`` seats are there, as far as the pool knows. After some seconds they
        are ended by force.
        """


class Launcher(ABC):
    """Starts ranks somewhere.

    Attributes:
        where: its name for people: "local", a Spark master, a Slurm job.
        channel_host: the driver's IPv4 address or name as the ranks reach it.
        shares_files: whether all ranks are on this machine.
        driver_logs: how to read the output of a driver that runs in a container, whose files are
            deleted after the run; empty for another driver.
    """

    where: str
    channel_host: str
    shares_files: bool
    driver_logs: str = ""

    @abstractmethod
    def slots(self, size: int, patience: float = 0.0) -> int:
        """Check that the ranks fit, and return their number.

        Args:
            size: the number of ranks; 0 for as many as there are slots.
            patience: the least number of seconds to wait for slots that may come back.

        Raises:
            SlotError: the ranks do not fit; has the numbers and the setting to change.
            CancelledError: the run was cancelled while it waited for slots.
        """

    @abstractmethod
    def launch(self, request: LaunchRequest) -> Launch:
        """Start all ranks of a job."""


class PoolKeeper(Launcher):
    """A launcher that can also keep a pool of tasks.

    Attributes:
        needs_pool: whether slots come only after tasks have been submitted: a fixed number of ranks
            takes a pool, too.
    """

    needs_pool = False

    def check_pool(self, least: int) -> None:
        """Check, before anything is launched, that this launcher can keep a pool of so many tasks.

        Raises:
            SlotError: it cannot; says why.
        """

    def expected_tasks(self) -> int | None:
        """How many tasks of a pool will start soon; None if that is not known."""
        return None

    def why_missing(self) -> str:
        """Why tasks that were asked for are not there, in sentences; empty if that is not known."""
        return ""

    @abstractmethod
    def launch_members(self, request: PoolRequest) -> MemberTasks:
        """Start the tasks of a pool, each as soon as there is a slot for it."""
