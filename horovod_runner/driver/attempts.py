"""Relaunches a failed run: how often, after which wait, and when no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.driver.driver import Driver
from horovod_runner.driver.elastic.launcher import PooledLauncher
from horovod_runner.errors import (
    CancelledError,
    ChannelError,
    DataError,
    GpuError,
    HangError,
    HorovodRunnerError,
    LaunchError,
    RankFailedError,
    RanksChangedError,
    SerializationError,
    SlotError,
)
from horovod_runner.launchers.launcher import JobCancelledError, Launcher
from horovod_runner.results.failures import FRAME
from horovod_runner.results.recorder import failed
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.wire.events import AttemptBegan, AttemptChanged, CheckpointKept
from horovod_runner.wire.job import Job

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
_PLACE_CHARACTERS = 1000  # of each failed attempt, which are all kept
# Another attempt would fail in the same way.
_FINAL = (
    CancelledError,
    ChannelError,
    DataError,
    GpuError,
    JobCancelledError,
    SerializationError,
    SlotError,
)


def run_attempts(
    job: Job,
    launcher: Launcher,
    sink: FanOut,
    *,
    archive: Archive,
    dataframes: Mapping[str, Any],
    cancelled: threading.Event,
    entered: Callable[[Driver], None],
) -> Any:
    """Run a job to its end, and relaunch it from its latest checkpoint as ``max_restarts`` allows.

    Args:
        job: what to run.
        launcher: where.
        sink: shows and records what comes back.
        archive: the run's checkpoints.
        dataframes: DataFrames whose rows are sent to the tasks with each launch, by dataset name.
        cancelled: as for :class:`~horovod_runner.driver.driver.Driver`.
        entered: called with each attempt's driver before the attempt begins.

    Returns:
        Rank 0's value.

    Raises:
        Exception: that of the last attempt, as :meth:`Driver.run` raises it.
    """
    pool = launcher if isinstance(launcher, PooledLauncher) else None
    ends: list[End] = []
    number = 0
    # The furthest step of any checkpoint or commit: writing one again is not progress.
    reached = -1
    while True:
        number += 1
        if cancelled.is_set():
            raise CancelledError(f"run {job.run_id} was cancelled before attempt {number} began")
        attempt = replace(job, attempt=number, checkpoints=archive.plan(number))
        driver = Driver(attempt, launcher, sink, cancelled, archive, dataframes=dataframes)
        entered(driver)
        latest = archive.latest
        sink.tell(AttemptBegan(number, None if latest is None else latest.step))
        try:
            return driver.run()
        except Exception as error:
            for checkpoint in archive.catch_up():
                sink.tell(CheckpointKept(checkpoint.folder, checkpoint.marker))
            if isinstance(error, RanksChangedError):
                before, job = job.size, _resized(job, launcher)
                sink.tell(AttemptChanged(f"from {before} to {job.size} ranks"))
                sink.notice(f"attempt {number + 1} begins: from {before} to {job.size} ranks")
                continue
            if pool is not None and pool.cancelled is not None:
                sink.tell(failed(pool.cancelled))
                raise pool.cancelled from error
            sink.tell(failed(error))
            max_restarts = job.options.max_restarts
            if isinstance(error, _FINAL) or max_restarts == 0:
                raise
            committed = -1 if pool is None else pool.committed
            reached = max([reached, committed, *(marker.step for marker in archive.markers)])
            ends.append(end_of(error, reached))
            seconds = wait_before_restart(ends, max_restarts)
            if seconds is None:
                sink.notice(f"attempt {number} failed, and none follows: {_why_final(ends)}")
                raise
            if job.options.elastic and ends[-1].kind == "lost" and seconds == _FIRST_SECONDS:
                seconds = 0.0  # the other ranks are there
            resumes_from = _latest(archive, committed)
            sink.notice(_restart_notice(attempt, error, ends, seconds, resumes_from))
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
    """The job with as many ranks as the next attempt has.

    Raises:
        SlotError: there are too few slots.
    """
    return replace(job, size=launcher.slots(job.size, job.limits.returning_slots))


def _latest(archive: Archive, committed: int) -> str:
    """What load_checkpoint returns in the next attempt."""
    checkpoint = archive.latest
    saved = "None" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
    if committed < 0:
        return saved
    commit = f"the commit of step {committed}"
    return commit if checkpoint is None else f"{commit}, or {saved} if it is later"


def _restart_notice(
    job: Job, error: Exception, ends: list[End], seconds: float, latest: str
) -> str:
    """What the user reads before the next attempt."""
    number, kind = job.attempt, ends[-1].kind
    first_line = (str(error).strip().splitlines() or [""])[0]
    count = sum(end.kind == kind for end in ends)
    what = "error" if kind == "error" else "loss of a process or host"
    return (
        f"attempt {number} failed: {type(error).__name__}: {first_line}\n"
        f"attempt {number + 1} begins in {seconds:g} s ({what} {count}, max_restarts="
        f"{job.options.max_restarts}); load_checkpoint returns {latest}"
    )


def _why_final(ends: list[End]) -> str:
    """Why there is no further attempt."""
    last = ends[-1]
    if len(ends) > 1 and ends[-2] == last and last.kind == "error":
        return (
            "the same error occurred again at the same place, and there was no newer checkpoint or "
            "commit meanwhile: it would occur in every attempt"
        )
    count = sum(end.kind == last.kind for end in ends)
    what = "errors" if last.kind == "error" else "losses of a process or host"
    return f"there were {count} {what} (max_restarts)"


def end_of(error: Exception, checkpoint: int) -> End:
    """How an attempt ended, by the error that it raised."""
    if isinstance(error, HangError):
        return End("error", "hang", checkpoint)
    if isinstance(error, RankFailedError):
        code = error.exit_code
        if code is None or code < 0:
            return End("lost", f"rank {error.rank}: {code}", checkpoint)
        return End("error", f"exit code {code}", checkpoint)
    if isinstance(error, LaunchError):
        return End("lost", "launch", checkpoint)
    # The user's exception counts by its place: its text may hold numbers that change.
    frames = FRAME.findall(str(error.__cause__))
    where = ":".join(frames[-1]) if frames else ""
    if isinstance(error, HorovodRunnerError):
        where = where or str(error)[:_PLACE_CHARACTERS]
    return End("error", f"{type(error).__qualname__} at {where}", checkpoint)


class End(NamedTuple):
    """How an attempt failed.

    Attributes:
        kind: "error" where the ranks' own code failed or hung; "lost" where a process, an executor
            or a host went away.
        place: what failed and where, equal for failures that are the same.
        checkpoint: the furthest step of any checkpoint or commit by then; -1 where there is none.
    """

    kind: Literal["error", "lost"]
    place: str
    checkpoint: int


def wait_before_restart(ends: Sequence[End], max_restarts: int) -> float | None:
    """The seconds to wait before the next attempt; None: there is none.

    Errors and losses are counted separately, each up to ``max_restarts``. An error that repeats at
    the same place without a newer checkpoint or commit would repeat for ever: the second time ends
    the run. The wait doubles with each failure of the same kind in a row, from 1 s to 60 s.

    Args:
        ends: how all attempts so far failed, in order.
        max_restarts: as given to HorovodRunner.
    """
    last = ends[-1]
    if sum(end.kind == last.kind for end in ends) > max_restarts:
        return None
    if len(ends) > 1 and last.kind == "error" and ends[-2] == last:
        return None
    in_a_row = 0
    for end in reversed(ends):
        if end.kind != last.kind or end.checkpoint != last.checkpoint:
            break
        in_a_row += 1
    return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** (in_a_row - 1)))
