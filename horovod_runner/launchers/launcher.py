"""The two protocols of a launcher: what starts ranks, and one launch under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from horovod_runner.errors import HorovodRunnerError, LaunchError
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.transport import ChannelAddress


class TaskLostError(LaunchError):
    """A task ended without an outcome.

    Attributes:
        task: its number.
    """

    def __init__(self, task: int, reason: str) -> None:
        super().__init__(reason)
        self.task = task


class LaunchLostError(LaunchError):
    """The system that had launched the ranks ended, and all ranks with it."""


class Launch(Protocol):
    """One launch of all ranks, under way."""

    @property
    def late_error(self) -> HorovodRunnerError | None:
        """The error to raise if no task has said Hello by :attr:`expected`."""

    @property
    def expected(self) -> float | None:
        """By when a task should have said Hello, in seconds of the monotonic clock; None: never."""

    @property
    def running(self) -> bool:
        """Whether all tasks are known to run, and can switch to detached mode."""

    @property
    def finished(self) -> bool:
        """Whether all ranks have ended."""

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended, one outcome each, in any order. Call it once finished.

        Raises:
            TaskLostError: a task was lost (its executor was killed).
            LaunchLostError: all tasks were lost.
            LaunchError: the launcher itself failed (a Spark job was cancelled).
        """

    def cancel(self) -> None:
        """End ranks that the driver's messages no longer reach; the others get its Stop."""


class Launcher(Protocol):
    """Starts ranks somewhere.

    Attributes:
        where: its name for people: "local", a Spark master, a Slurm job.
        channel_host: the driver's IPv4 address or name as the ranks reach it.
        shares_files: whether all ranks are on this machine.
    """

    where: str
    channel_host: str
    shares_files: bool

    def slots(self, size: int, patience: float = 0.0) -> int:
        """Check that the ranks fit, and return their number.

        Args:
            size: the number of ranks; 0 for as many as there are slots.
            patience: the least number of seconds to wait for slots that may come back.

        Raises:
            SlotError: the ranks do not fit; has the numbers and the setting to change.
            CancelledError: the run was cancelled while it waited for slots.
        """

    def launch(
        self,
        job: Job,
        address: ChannelAddress,
        wake: Callable[[], None],
        dataframes: Mapping[str, Any],
    ) -> Launch:
        """Start all ranks of a job.

        Args:
            job: the job.
            address: the driver's channel.
            wake: called, from any thread, when the launch has finished.
            dataframes: Spark DataFrames whose rows are sent to the tasks with the launch, by
                dataset name. Empty unless the ranks may be on other machines and share no folder
                with the driver.
        """
