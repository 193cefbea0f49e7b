"""The local launcher: ranks as child processes of the driver. Needs neither pyspark nor Java."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from dataclasses import replace

from horovod_runner.common.threads import start_thread
from horovod_runner.driver.launcher import (
    Launch,
    LaunchRequest,
    MemberTasks,
    PoolKeeper,
    PoolRequest,
)
from horovod_runner.errors import LaunchError
from horovod_runner.launchers.member import serve
from horovod_runner.task.task import TaskSetup, run_rank
from horovod_runner.wire.channel import make_room
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.worker.startup.rank_environment import inherited_environment

# Open in the driver: a worker's pipes and the link to the channel, 22 in all, and the worker's ends
# of the pipes while it starts. A member of a pool has a second link.
_FILES_OF_A_RANK, _FILES_OF_A_MEMBER = 36, 50


class LocalLauncher(PoolKeeper):
    """Starts any number of ranks on this machine."""

    where = "local"
    channel_host = "127.0.0.1"
    shares_files = True

    def slots(self, size: int, patience: float = 0.0) -> int:
        """The number of ranks asked for, if this process may open enough files.

        Raises ChannelError, as the methods below, if the hard limit is too low.
        """
        make_room(size, size * _FILES_OF_A_RANK)
        return size

    def launch(self, request: LaunchRequest) -> LocalLaunch:
        """Start one thread per rank, which starts and supervises the rank's worker.

        There are no DataFrames here: the ranks share this machine's disk.
        """
        # Again: other code has opened files since.
        make_room(request.job.size, request.job.size * _FILES_OF_A_RANK)
        return LocalLaunch(request)

    def launch_members(self, request: PoolRequest) -> LocalMembers:
        """Start one thread per seat."""
        make_room(request.seats, request.seats * _FILES_OF_A_MEMBER)
        return LocalMembers(request)


class LocalMembers(MemberTasks):
    """The tasks of a pool on this machine: threads, which do not end before they are told to."""

    def __init__(self, request: PoolRequest) -> None:
        setup = _setup(request.job)
        self._threads = [
            start_thread(f"seat-{seat}", serve, request.job, request.address, seat, setup)
            for seat in range(request.seats)
        ]

    def close(self, served: Collection[int], seconds: float) -> None:
        """Wait for the threads, which the pool has told to end. They cannot be ended by force."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _setup(job: Job) -> TaskSetup:
    """Where the tasks of a run on this machine run.

    Copied once, before they start: a notebook may change it while the threads start.
    """
    environment = {**inherited_environment(), **job.environment}
    return TaskSetup(0, list(job.path), environment, directory=os.getcwd(), owner=os.getpid())


class LocalLaunch(Launch):
    """The ranks of one run on this machine: threads, which always get the channel's Stop."""

    def __init__(self, request: LaunchRequest) -> None:
        job = self._job = request.job
        self._address = request.address
        self._wake = request.wake
        self._outcomes: list[Outcome] = []
        self._setup = _setup(job)
        self._threads = [start_thread(f"rank-{task}", self._run, task) for task in range(job.size)]

    def _run(self, task: int) -> None:
        try:
            outcome = run_rank(self._job, self._address, replace(self._setup, task=task))
        except Exception as error:  # the system refused something: files, threads, memory
            self.problem = LaunchError(
                f"task {task} of {self._job.size} could not go on on this machine: {error!r}"
            )
            outcome = Outcome(task, hostname=socket.gethostname(), problem=str(self.problem))
        self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if len(self._outcomes) == self._job.size:
            self.finished = True
        self._wake()

    def outcomes(self) -> list[Outcome]:
        for thread in self._threads:
            thread.join()
        return list(self._outcomes)
