"""Supervises the ranks from an executor, where no task can reach the driver itself.

    driver  X--- no way ---X  tasks --channel--> StandIn, beside task 0
       ^------ files of the journal, while the run lasts --------|
       '------ Outcome, with the Record, through Spark ----------'

It uses the driver's supervisor. What a driver shows, it writes into the journal. Where the driver
cannot read one, it keeps all until the end of the run.
"""

from __future__ import annotations

import os
import pickle

from horovod_runner.common.threads import start_thread
from horovod_runner.driver.checks import checks_of
from horovod_runner.driver.detached.journal import open_writer
from horovod_runner.driver.detached.keeper import CAPACITY, Capacity, Keeper
from horovod_runner.driver.launcher import Launch
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.supervisor import Supervisor
from horovod_runner.errors import HorovodRunnerError, LaunchError
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.job import Job, Outcome, Record


class StandIn:
    """Supervises in a thread of its own from construction to :meth:`close`.

    Args:
        host: an address of this host that all tasks reach.

    Attributes:
        address: of its channel, for the tasks.

    Raises:
        ChannelError: no socket could be opened.
    """

    def __init__(self, job: Job, host: str, capacity: Capacity = CAPACITY) -> None:
        self._capacity = capacity
        self._channel = Channel(host, job.size, job.limits)
        # The credentials of the checkpoint folder may be among them.
        self._before = {name: os.environ.get(name) for name in job.environment}
        os.environ.update(job.environment)
        try:
            self._start(job)
        except BaseException:
            self._restore()
            self._channel.close()
            raise

    def _start(self, job: Job) -> None:
        self._journal = open_writer(job)
        if self._journal is not None and not self._journal.written:
            self._journal.put([])  # by which the driver finds it
        required = job.options.checkpoint_config.required
        self._keeper = Keeper(self._journal, self._capacity, required=required)
        self.address = self._channel.address
        self._launch = _StartedElsewhere()
        self._supervisor = Supervisor(
            job, self._channel, self._launch, self._keeper, Requests(), checks=checks_of(job)
        )
        self._thread = start_thread("stand-in", self._work)

    def _work(self) -> None:
        try:
            self._supervisor.run()
        except HorovodRunnerError:
            pass  # all ranks are lost: Spark reports it to the driver
        except Exception as error:
            problem = LaunchError(f"the supervisor beside rank 0 failed: {error!r}")
            try:
                self._supervisor.fail(problem)
            finally:
                self._channel.close()  # tasks that wait for an answer notice it, and end

    def _restore(self) -> None:
        """Restore the environment: Spark uses this process again, for anyone."""
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def close(self) -> Record:
        """Stop supervising once all ranks have ended; returns the record for the driver."""
        self._launch.finished = True
        self._channel.wake()
        self._thread.join()
        kept, journal = self._keeper.kept, self._journal
        try:
            self._channel.close()
            if journal is not None:
                journal.close()
                if journal.unwritten is not None:
                    kept = [*journal.unwritten, *kept]
        finally:
            self._restore()
        problem = self._supervisor.problem
        return Record(
            self._supervisor.roster.slots,
            kept,
            self._keeper.cut,
            b"" if problem is None else pickle.dumps(problem),
            list(self._supervisor.failed.values()),
            0 if journal is None else journal.written,
            [] if journal is None else journal.unread,
        )


class _StartedElsewhere(Launch):
    """Takes the place of the launch: the driver started the tasks, and gets their outcomes.

    Tasks need not be ended by force: they hear the channel's Stop, and end by themselves.
    """

    def outcomes(self) -> list[Outcome]:
        return []
