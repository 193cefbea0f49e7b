"""One attempt as the driver sees it: launch, supervise, and turn the end into a value or an error.

Everything happens in the thread that called ``run``: output lands in the right notebook cell, and
Ctrl-C takes effect at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.text import count_text, ranks_text
from horovod_runner.driver.checks import checks_of
from horovod_runner.driver.intake import Intake
from horovod_runner.driver.launcher import (
    Launch,
    Launcher,
    LaunchLostError,
    LaunchRequest,
    TaskLostError,
)
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.supervisor import Supervisor
from horovod_runner.errors import LaunchError, SerializationError
from horovod_runner.results import failures
from horovod_runner.results.trace.arrivals import Arrivals
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.events import RanksPlaced
from horovod_runner.wire.job import Job, Outcome, Record

_UNCOMPARED = (
    "weight_check: the ranks' weights were never compared. The callbacks of horovod_runner.keras "
    "and horovod_runner.lightning do it at the end of each epoch; in a loop of your own call "
    "horovod_runner.check_weights(model, epoch) there, on every rank."
)


class AttemptRunner:
    """Runs one attempt.

    Args:
        archive: takes the checkpoints; None where there is no place for them.
        dataframes: DataFrames whose rows are sent to the tasks with the launch, by dataset name.
    """

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        sink: FanOut,
        requests: Requests,
        archive: Archive | None = None,
        *,
        dataframes: Mapping[str, Any] = {},
    ) -> None:
        self._job = job.patient() if job.options.local else job
        self._dataframes = dataframes
        self._launcher = launcher
        self._sink = sink
        self._requests = requests
        self._traces = Arrivals(job.run_id, job.options.debug_config.torch_profiler)
        self._intake = Intake(sink, archive, self._traces, job.checkpoints, job.limits)

    def run(self) -> Any:
        """Run the job to its end; returns rank 0's value, or all ranks' as a list.

        Raises:
            Exception: the user's own, from the first rank that failed.
            RankFailedError: a rank died without an exception.
            LaunchError: the ranks could not be started, or Spark ended them.
            HangError: the ranks made no progress for too long.
            CheckpointError: a checkpoint that is required could not be written.
            CancelledError: another thread asked for it.
            GpuError: a host has too few GPUs.
            SerializationError: a value cannot be loaded here.
        """
        job = self._job
        with Channel(self._launcher.channel_host, job.size, job.limits) as channel, self._traces:
            launch = self._launcher.launch(
                LaunchRequest(job, channel.address, channel.wake, self._dataframes)
            )
            supervisor = Supervisor(
                job, channel, launch, self._intake, self._requests, checks=checks_of(job)
            )
            with self._requests.answered_by(supervisor):
                try:
                    outcomes, reported = self._supervise(channel, launch, supervisor)
                finally:
                    self._intake.finish(None)
            codes = {outcome.rank: outcome.exit_code for outcome in outcomes}
            self._sink.tell(RanksPlaced(supervisor.roster.infos(codes)))
        return self._result(outcomes, supervisor, reported)

    def _supervise(
        self, channel: Channel, launch: Launch, supervisor: Supervisor
    ) -> tuple[list[Outcome], list[int]]:
        """Supervise to the end: how the ranks ended, and those that failed, in order."""
        try:
            supervisor.run()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._sink.notice("interrupted: ending all ranks")
            supervisor.call_off()
            raise
        reported = list(supervisor.failed.values())
        outcomes = self._outcomes(launch, supervisor)
        for outcome in outcomes:
            if outcome.record is not None:
                self._intake.detached(channel.address, channel.wake, None)
                reported = self._replay(outcome.record, supervisor)
                supervisor.roster.pids = {each.rank: each.pid for each in outcomes if each.pid}
        return outcomes, reported

    def _outcomes(self, launch: Launch, supervisor: Supervisor) -> list[Outcome]:
        try:
            return launch.outcomes()
        except LaunchError as error:
            if isinstance(error, LaunchLostError):
                raise LaunchError(str(error)) from None
            if supervisor.problem is not None:
                raise supervisor.problem from None
            if isinstance(error, TaskLostError):
                raise supervisor.roster.lost_error([error.task], str(error)) from None
            raise

    def _replay(self, record: Record, supervisor: Supervisor) -> list[int]:
        """Replay what the stand-in kept; returns the ranks that failed, in order."""
        supervisor.roster.set_slots(record.slots)
        if record.problem and supervisor.problem is None:
            # Over the launcher's connection.
            supervisor.problem = pickle.loads(record.problem)  # noqa: S301
        self._intake.finish(record)
        supervisor.problem = supervisor.problem or self._intake.problem
        if record.cut:
            self._sink.notice(
                f"{record.cut} characters of what the ranks printed were too many to keep: the "
                "first ones are missing above, and are in the executors' logs"
            )
        return record.failed

    def _result(self, outcomes: list[Outcome], supervisor: Supervisor, reported: list[int]) -> Any:
        if supervisor.problem is not None:
            raise supervisor.problem
        # A task that was given no rank has a problem, which says so.
        lost = {each.rank: each.lost for each in outcomes if each.lost and each.rank >= 0}
        if lost:
            self._sink.notice(
                f"the driver lost touch with {ranks_text(list(lost))}: the last "
                f"{sum(lost.values())} batches of messages are missing here"
            )
        if not all(outcome.ok for outcome in outcomes):
            raise failures.run_error(outcomes, reported)
        supervisor.notes.finish()
        detached = any(outcome.record for outcome in outcomes)
        weights = supervisor.weights
        checked = weights is None or weights.compared or detached or self._job.size == 1
        if not checked:
            self._sink.notice(_UNCOMPARED)
        if len(outcomes) < self._job.size:
            raise LaunchError(
                f"Spark ran {count_text(len(outcomes), 'task')} instead of {self._job.size}"
            )
        workers = {outcome.rank: outcome.worker for outcome in outcomes if outcome.worker}
        try:
            if self._job.all_values:
                return [pickle.loads(workers[rank].value) for rank in sorted(workers)]  # noqa: S301
            return pickle.loads(workers[0].value)  # noqa: S301 - from a task of this run
        except Exception as error:
            raise SerializationError(
                f"main returned a value that cannot be loaded on the driver: {error}. A package "
                "that the ranks have is missing or older here; return plain values or arrays."
            ) from error
