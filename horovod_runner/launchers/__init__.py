"""Two ways to start a run's ranks, one contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from horovod_runner.channel import ChannelAddress
from horovod_runner.errors import HorovodRunnerError, LaunchError
from horovod_runner.job import Job, Outcome


class TaskLostError(LaunchError):
    """A task went away without an outcome.

    Attributes:
        task: its number.
    """

    def __init__(self, task: int, reason: str) -> None:
        super().__init__(reason)
        self.task = task


class LaunchLostError(LaunchError):
    """What had launched the ranks went away, and all of them with it."""


class Launch(Protocol):
    """One launch of all ranks, under way."""

    @property
    def late(self) -> HorovodRunnerError | None:
        """What to say when the tasks have not started in time."""

    @property
    def expected(self) -> float | None:
        """By when some task should have said hello, by the monotonic clock; None: some day."""

    @property
    def running(self) -> bool:
        """Whether the tasks are known to run, and can do without the driver (deputy.py)."""

    @property
    def finished(self) -> bool:
        """Whether every rank is gone."""

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended, one outcome each, in any order; once finished.

        Raises:
            TaskLostError: a task went away (its executor was killed).
            LaunchLostError: all went away.
            LaunchError: the launcher itself broke (a Spark job was cancelled).
        """

    def cancel(self) -> None:
        """End ranks that no longer hear the driver; those that do are told over the channel."""


class Launcher(Protocol):
    """Starts ranks somewhere.

    Attributes:
        where: its name for people: "local", a Spark master, a Slurm job.
        channel_host: the driver's IPv4 address or name as the ranks reach it.
        shares_files: whether all ranks are on this machine.
        frames: DataFrames, by name, whose rows come to the tasks with the launch.
    """

    where: str
    channel_host: str
    shares_files: bool
    frames: Mapping[str, Any]

    def slots(self, size: int, patience: float = 0.0) -> int:
        """Check that ``size`` ranks fit (0: as many as there are), and return how many to start.

        Args:
            size: how many.
            patience: seconds to wait at least for slots that are to come back.

        Raises:
            SlotError: they do not fit, with the numbers and the setting to change.
            CancelledError: the run was cancelled while it waited for slots.
        """

    def launch(self, job: Job, address: ChannelAddress, wake: Callable[[], None]) -> Launch:
        """Start all ranks of a job.

        Args:
            job: the job.
            address: the driver's channel.
            wake: called, from any thread, when the launch has finished.
        """
