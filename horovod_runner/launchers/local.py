"""The local launcher: child processes of the driver. Needs neither pyspark nor Java."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from horovod_runner.channel import ChannelAddress
from horovod_runner.job import Job, Outcome
from horovod_runner.process import inherited_environment
from horovod_runner.rank import Surroundings, run_rank


class LocalLauncher:
    """Starts ranks on this machine; any number of them."""

    where = "local"
    channel_host = "127.0.0.1"
    shares_files = True
    frames: Mapping[str, Any] = {}

    def slots(self, size: int, patience: float = 0.0) -> int:
        """As many as asked for: the machine is the user's own."""
        return size

    def launch(self, job: Job, address: ChannelAddress, wake: Callable[[], None]) -> LocalLaunch:
        """Start a thread a rank, which starts and watches the rank's worker."""
        return LocalLaunch(job, address, wake)


class LocalLaunch:
    """The ranks of one run on this machine."""

    late = None
    expected = None
    running = False

    def __init__(self, job: Job, address: ChannelAddress, wake: Callable[[], None]) -> None:
        self._job = job
        self._address = address
        self._wake = wake
        self._outcomes: list[Outcome] = []
        # Taken once, here: a notebook may change them while the threads start.
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
        here = Surroundings(
            task, self._path, self._environment, directory=self._directory, owner=os.getpid()
        )
        outcome = run_rank(self._job, self._address, here)
        self._outcomes.append(outcome)
        self._wake()

    @property
    def finished(self) -> bool:
        """Whether every rank is gone."""
        return len(self._outcomes) == self._job.size

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended."""
        for thread in self._threads:
            thread.join()
        return list(self._outcomes)

    def cancel(self) -> None:
        """Nothing to add to the channel's Stop: the ranks' watchers live in this process."""
