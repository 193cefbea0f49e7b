"""The local launcher: ranks as child processes of the driver. Needs neither pyspark nor Java."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from horovod_runner.task.process import inherited_environment
from horovod_runner.task.task import TaskSetup, run_rank
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.transport import ChannelAddress


class LocalLauncher:
    """Starts any number of ranks on this machine."""

    where = "local"
    channel_host = "127.0.0.1"
    shares_files = True

    def slots(self, size: int, patience: float = 0.0) -> int:
        """The number of ranks asked for: nothing limits it here."""
        return size

    def launch(
        self,
        job: Job,
        address: ChannelAddress,
        wake: Callable[[], None],
        dataframes: Mapping[str, Any],
    ) -> LocalLaunch:
        """Start one thread per rank, which starts and supervises the rank's worker.

        ``dataframes`` is empty here: the ranks share this machine's disk.
        """
        return LocalLaunch(job, address, wake)


class LocalLaunch:
    """The ranks of one run on this machine."""

    late_error = None
    expected = None
    running = False

    def __init__(self, job: Job, address: ChannelAddress, wake: Callable[[], None]) -> None:
        self._job = job
        self._address = address
        self._wake = wake
        self._outcomes: list[Outcome] = []
        # Copied once, here: a notebook may change them while the threads start.
        self._path = list(job.path)
        self._environment = {**inherited_environment(), **job.environment}
        self._directory = os.getcwd()
        self._threads = [
            threading.Thread(
                target=self._run, args=[task], name=f"horovod_runner-rank-{task}", daemon=True
            )
            for task in range(job.size)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, task: int) -> None:
        setup = TaskSetup(
            task, self._path, self._environment, directory=self._directory, owner=os.getpid()
        )
        self._outcomes.append(run_rank(self._job, self._address, setup))
        self._wake()

    @property
    def finished(self) -> bool:
        """Whether all ranks have ended."""
        return len(self._outcomes) == self._job.size

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended."""
        for thread in self._threads:
            thread.join()
        return list(self._outcomes)

    def cancel(self) -> None:
        """Do nothing: the tasks are threads of this process, and always get the channel's Stop."""
