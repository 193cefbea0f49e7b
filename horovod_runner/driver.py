"""Supervises one run: opens the channel, launches, listens, and turns the end into a result.

Everything happens in the thread that called ``run``: output lands in the right notebook cell, and
Ctrl-C is heard at once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from threading import Event
from typing import Any

from horovod_runner import failure, messages, topology
from horovod_runner.channel import Channel
from horovod_runner.errors import (
    CancelledError,
    HorovodRunnerError,
    LaunchError,
    SerializationError,
)
from horovod_runner.job import Job, Outcome
from horovod_runner.launchers import Launch, Launcher
from horovod_runner.sinks import Sink

_GATHER_SECONDS = 120.0  # between the first task's hello and the last one's
_CAUSE_SECONDS = 2.0  # survivors may report before the rank that caused their errors
_TOGETHER_SECONDS = 0.2  # for ranks that fail in the same way, to name them together
_STOP_SECONDS = 10.0


class Driver:
    """One run of a job.

    Args:
        job: what to run.
        launcher: where.
        sink: takes what comes back.
        cancelled: set, with a call of :meth:`wake` after it, to end the run.
    """

    def __init__(self, job: Job, launcher: Launcher, sink: Sink, cancelled: Event) -> None:
        self._job = job
        self._launcher = launcher
        self._sink = sink
        self._cancelled = cancelled
        self._wake: Callable[[], None] = lambda: None
        self._hellos: dict[int, messages.Hello] = {}
        self._slots: list[topology.Slot] = []
        self._pids: dict[int, int] = {}
        self._failed: list[int] = []
        self._felt: list[int] = []
        self._stopped = False
        self._problem: HorovodRunnerError | None = None
        self._deadline: float | None = None

    def run(self) -> Any:
        """Run the job to its end; returns rank 0's value.

        Raises:
            Exception: the user's own, from the first rank that failed.
            RankFailedError: a rank died without an exception.
            LaunchError: the ranks could not be started, or Spark ended them.
            CancelledError: another thread asked for it.
            GpuError: a host has too few GPUs.
            SerializationError: rank 0's value cannot be loaded here.
        """
        with Channel(self._launcher.channel_host, self._job.size) as channel:
            self._channel = channel
            self._wake = channel.wake
            launch = self._launcher.launch(self._job, channel.address, channel.wake)
            try:
                self._listen(launch)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self._sink.notice("interrupted: ending all ranks")
                self._call_off(launch)
                raise
            outcomes = self._outcomes(launch)
        return self._result(outcomes)

    def wake(self) -> None:
        """Make the run look at ``cancelled``; for other threads."""
        self._wake()

    def _listen(self, launch: Launch, until: float | None = None) -> None:
        """Handle messages until the launch has finished, or ``until``."""
        while not launch.finished and (until is None or time.monotonic() < until):
            if self._cancelled.is_set() and not self._stopped:
                raise CancelledError(f"run {self._job.run_id} was cancelled: all ranks are gone")
            deadlines = [moment for moment in (self._deadline, until) if moment is not None]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for task, message in self._channel.receive(timeout):
                self._handle(task, message)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._deadline = None
                self._on_deadline(launch)

    def _handle(self, task: int, message: messages.FromRank) -> None:
        match message:
            case messages.Hello():
                self._on_hello(task, message)
            case messages.Started():
                self._pids[message.rank] = message.pid
                if len(self._pids) == self._job.size > 1:
                    self._sink.notice(topology.describe(self._slots, self._pids))
            case messages.Output():
                self._sink.output(message.rank, message.stream, message.text)
            case messages.Log():
                self._sink.log(message.rank, message.text)
            case messages.Failed():
                self._on_failed(message)
            case messages.Ended():
                self._on_ended(task, message)

    def _on_hello(self, task: int, hello: messages.Hello) -> None:
        if self._stopped or task in self._hellos:
            # A second hello is a stage that Spark runs again by itself: never train twice.
            self._channel.send(task, messages.Stop("this run has already started"))
            return
        self._hellos[task] = hello
        self._channel.send(task, messages.Welcome())
        if len(self._hellos) < self._job.size:
            self._deadline = self._deadline or time.monotonic() + _GATHER_SECONDS
            return
        self._deadline = None
        try:
            self._slots = topology.assign(
                (hello.offer for hello in self._hellos.values()), self._job.gpus_per_rank
            )
        except HorovodRunnerError as error:
            self._problem = error
            self._stop("the ranks cannot be placed")
            return
        first = self._hellos[0]
        assignment = messages.Assignment(
            self._slots, first.rendezvous, first.offer.address, first.master_port
        )
        for other in self._hellos:
            self._channel.send(other, assignment)

    def _on_failed(self, message: messages.Failed) -> None:
        if self._stopped:
            return
        if message.secondary:
            self._felt.append(message.rank)
            self._deadline = self._deadline or time.monotonic() + _CAUSE_SECONDS
            return
        self._failed.append(message.rank)
        self._deadline = time.monotonic() + _TOGETHER_SECONDS
        if len(self._failed) == self._job.size:
            self._stop("all ranks failed")

    def _on_deadline(self, launch: Launch) -> None:
        if self._failed or self._felt:
            ranks = failure.ranks_text(self._failed or self._felt)
            self._stop(f"{ranks} failed")
            return
        missing = sorted(set(range(self._job.size)) - set(self._hellos))
        self._problem = LaunchError(
            f"{len(missing)} of {self._job.size} tasks did not report within "
            f"{_GATHER_SECONDS:.0f} s of the first (tasks {missing[:10]}): their executors cannot "
            f"reach the driver at {self._channel.address.host}, or start very slowly."
        )
        self._stop("some tasks did not report")
        launch.cancel()

    def _on_ended(self, task: int, message: messages.Ended) -> None:
        lost = message.sent - self._channel.received(task) + 1
        if lost > 0:
            self._sink.notice(f"{lost} batches of messages from task {task} were lost on the way")
        self._channel.send(task, messages.Taken())

    def _stop(self, reason: str) -> None:
        self._stopped = True
        for task in self._hellos:
            self._channel.send(task, messages.Stop(reason))

    def _call_off(self, launch: Launch) -> None:
        """End a run that the caller gave up; all ranks are gone when this returns."""
        self._stop("the driver gave the run up")
        self._deadline = None
        self._listen(launch, until=time.monotonic() + _STOP_SECONDS)
        if not launch.finished:
            launch.cancel()
            self._listen(launch, until=time.monotonic() + _STOP_SECONDS)

    def _outcomes(self, launch: Launch) -> list[Outcome]:
        for task, message in self._channel.receive(0):
            self._handle(task, message)
        try:
            return launch.outcomes()
        except LaunchError:
            if self._problem is not None:
                raise self._problem from None
            raise

    def _result(self, outcomes: list[Outcome]) -> Any:
        if self._problem is not None:
            raise self._problem
        for outcome in outcomes:
            if outcome.lost:
                self._sink.notice(
                    f"the driver lost touch with rank {outcome.rank}: its last {outcome.lost} "
                    "batches of messages are missing here"
                )
        if not all(outcome.ok for outcome in outcomes):
            raise failure.run_error(outcomes, self._failed)
        first = next(outcome for outcome in outcomes if outcome.rank == 0)
        assert first.worker is not None  # noqa: S101 - it is ok
        try:
            return pickle.loads(first.worker.value)  # noqa: S301 - over the launcher's connection
        except Exception as error:
            raise SerializationError(
                f"main returned a value that cannot be loaded on the driver: {error}. A package "
                "that the ranks have is missing or older here; return plain values or arrays."
            ) from error
