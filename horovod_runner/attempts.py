"""One run, attempt after attempt: launches again what failed, as `restart` decides."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from horovod_runner.archive import Archive
from horovod_runner.driver import Driver
from horovod_runner.errors import (
    CancelledError,
    ChannelError,
    DataError,
    GpuError,
    HangError,
    HorovodRunnerError,
    LaunchError,
    RankFailedError,
    SerializationError,
    SlotError,
)
from horovod_runner.job import Job
from horovod_runner.launchers import Launcher
from horovod_runner.recorder import Recorder
from horovod_runner.restart import End, wait_before_restart
from horovod_runner.sinks import Sink

_SLOT_SECONDS = 60.0  # for an executor or a host that is to come back
# What another attempt would only meet again.
_FINAL = (CancelledError, ChannelError, DataError, GpuError, SerializationError, SlotError)
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def run_attempts(
    job: Job,
    launcher: Launcher,
    sink: Sink,
    recorder: Recorder,
    *,
    archive: Archive,
    cancelled: threading.Event,
    max_restarts: int,
    entered: Callable[[Driver], None],
) -> Any:
    """Run a job to its end; returns rank 0's value.

    Args:
        job: what to run.
        launcher: where.
        sink: takes what comes back.
        recorder: is told of failed attempts.
        archive: the run's checkpoints.
        cancelled: as for :class:`~horovod_runner.driver.Driver`.
        max_restarts: how often to launch again.
        entered: told of each attempt's driver before it begins.

    Raises:
        Exception: that of the last attempt, as :meth:`Driver.run` raises it.
    """
    ends: list[End] = []
    reached = -1  # the furthest step of any checkpoint: one that is written again is no gain
    while True:
        number = len(ends) + 1
        attempt = replace(job, attempt=number, checkpoints=archive.plan(number))
        driver = Driver(attempt, launcher, sink, cancelled, archive)
        entered(driver)
        sink.attempt(number)
        try:
            return driver.run()
        except Exception as error:
            recorder.failed(error)
            for untold in archive.catch_up():
                sink.checkpoint(untold)
            if isinstance(error, _FINAL) or max_restarts == 0:
                raise
            latest = archive.latest
            reached = max([reached, *(marker.step for marker in archive.markers)])
            ends.append(end_of(error, reached))
            seconds = wait_before_restart(ends, max_restarts)
            told = (str(error).strip().splitlines() or [""])[0]
            if seconds is None:
                sink.notice(f"attempt {number} failed, and none follows: {_why(ends)}")
                raise
            goes_on = "nothing" if latest is None else f"the checkpoint of step {latest.step}"
            count = sum(end.kind == ends[-1].kind for end in ends)
            what = "error" if ends[-1].kind == "error" else "loss of a process or host"
            sink.notice(
                f"attempt {number} failed: {type(error).__name__}: {told}\n"
                f"attempt {number + 1} begins in {seconds:g} s ({what} {count}, max_restarts="
                f"{max_restarts}); load_checkpoint gives {goes_on}"
            )
            if cancelled.wait(seconds):
                raise CancelledError(f"run {job.run_id} was cancelled between two attempts") from (
                    error
                )
            try:
                launcher.slots(job.size, _SLOT_SECONDS)
            except SlotError as too_few:
                sink.notice(f"no attempt {number + 1}: {too_few}")
                raise error from error.__cause__


def _why(ends: list[End]) -> str:
    last = ends[-1]
    if len(ends) > 1 and ends[-2] == last and last.kind == "error":
        return (
            "the same error came back at the same place, and no checkpoint got further meanwhile; "
            "it would do so for ever"
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
    # The user's own: where it was raised, whatever numbers are in its text.
    frames = _FRAME.findall(str(error.__cause__))
    where = ":".join(frames[-1]) if frames else ""
    if isinstance(error, HorovodRunnerError):
        where = where or str(error)
    return End("error", f"{type(error).__qualname__} at {where}", checkpoint)
