"""Runs a job to its end, in as many attempts as it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.driver.attempt import AttemptRunner
from horovod_runner.driver.elastic.pool import Pool
from horovod_runner.driver.launcher import Launcher
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.restarts import RestartPolicy
from horovod_runner.errors import (
    CancelledError,
    HorovodRunnerError,
    RanksChangedError,
    SlotError,
)
from horovod_runner.results.recorder import failed
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.wire.events import AttemptBegan, AttemptChanged, CheckpointKept
from horovod_runner.wire.job import Job


def run_attempts(
    job: Job,
    launcher: Launcher,
    sink: FanOut,
    *,
    restarts: RestartPolicy,
    archive: Archive,
    dataframes: Mapping[str, Any],
    requests: Requests,
) -> Any:
    """Run a job to its end, and relaunch it from its latest checkpoint where that is decided.

    Returns rank 0's value. Raises what the last attempt does, see :meth:`AttemptRunner.run`. The
    rows of DataFrames are sent to the tasks with each launch.
    """
    pool = launcher if isinstance(launcher, Pool) else None
    cancelled = requests.cancelled
    number = 0
    while True:
        number += 1
        if cancelled.is_set():
            raise CancelledError(f"run {job.run_id} was cancelled before attempt {number} began")
        attempt = replace(job, attempt=number, checkpoints=archive.plan(number))
        runner = AttemptRunner(attempt, launcher, sink, requests, archive, dataframes=dataframes)
        latest = archive.latest
        sink.tell(AttemptBegan(number, None if latest is None else latest.step))
        try:
            return runner.run()
        except Exception as error:
            for checkpoint in archive.catch_up():
                sink.tell(CheckpointKept(checkpoint.folder, checkpoint.marker))
            if isinstance(error, RanksChangedError):
                before = job.size
                try:
                    job = _resized(job, launcher)
                except HorovodRunnerError as too_few:
                    sink.tell(failed(too_few))
                    raise
                sink.tell(AttemptChanged(f"from {before} to {job.size} ranks"))
                sink.notice(f"attempt {number + 1} begins: from {before} to {job.size} ranks")
                continue
            if pool is not None and pool.cancelled is not None:
                sink.tell(failed(pool.cancelled))
                raise pool.cancelled from error
            sink.tell(failed(error))
            committed = -1 if pool is None else pool.committed
            step = max([committed, *(marker.step for marker in archive.markers)])
            seconds, why = restarts.decide(error, step)
            if seconds is None:
                if why:
                    sink.notice(f"attempt {number} failed, and none follows: {why}")
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            sink.notice(
                f"attempt {number} failed: {type(error).__name__}: {first_line}\n"
                f"attempt {number + 1} begins in {seconds:g} s ({why}); load_checkpoint returns "
                f"{_latest(archive, committed)}"
            )
            if cancelled.wait(seconds):
                raise CancelledError(f"run {job.run_id} was cancelled between two attempts") from (
                    error
                )
            try:
                job = _resized(job, launcher)
            except SlotError as too_few:
                sink.notice(f"no attempt {number + 1}: {too_few}")
                raise error from error.__cause__


def _resized(job: Job, launcher: Launcher) -> Job:
    return replace(job, size=launcher.slots(job.size, job.limits.returning_slots))


def _latest(archive: Archive, committed: int) -> str:
    """What load_checkpoint returns in the next attempt."""
    checkpoint = archive.latest
    saved = "None" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
    if committed < 0:
        return saved
    commit = f"the commit of step {committed}"
    return commit if checkpoint is None else f"{commit}, or {saved} if it is later"
