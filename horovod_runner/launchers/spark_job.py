"""Runs the barrier job of a Spark launch, on a classic session or on Spark Connect."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from horovod_runner.common.spark_session import collect_in_arrow, conf_of, spark_context
from horovod_runner.common.threads import start_thread
from horovod_runner.driver.launcher import (
    JobCancelledError,
    Launch,
    LaunchLostError,
    LaunchRequest,
    MemberTasks,
    PoolRequest,
)
from horovod_runner.errors import LaunchError, SlotError
from horovod_runner.launchers import connect
from horovod_runner.launchers.spark_errors import ended_by, lost_task
from horovod_runner.wire.job import Outcome, decode_outcome

if TYPE_CHECKING:
    from pyspark import SparkStageInfo
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 1.0
_WATCH_SECONDS = 1.0
_OUTCOME_SCHEMA = "outcome binary"


class SparkLaunch(Launch):
    """One barrier job under way. A thread waits for it.

    A SparkContext counts slots exactly: the tasks start as soon as other jobs let them, so the
    launch expects no task before Spark has started all.

    Args:
        task: the body of a task, for ``mapInArrow``.
        detaches: whether to notice when Spark has started all tasks, which can then do without the
            driver.
    """

    def __init__(
        self,
        spark: SparkSession,
        request: LaunchRequest,
        task: Callable[..., Any],
        profile: ResourceProfile | None,
        *,
        detaches: bool,
    ) -> None:
        self._spark = spark
        self._job = request.job
        self._dataframes = request.dataframes
        self._wake = request.wake
        self._task = task
        self._profile = profile
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        _start_inheriting_thread(spark, self._run)
        if detaches:
            start_thread("tasks", self._watch_starts)

    def _watch_starts(self) -> None:
        with suppress(Exception):  # the session has ended
            while not self._done.wait(_WATCH_SECONDS):
                for stage in _stages(self._spark, self._job.run_id):
                    if stage.numActiveTasks >= self._job.size:
                        self._find_task_0(stage)
                        self._tasks_have_started()
                        return

    def _find_task_0(self, stage: SparkStageInfo) -> None:
        """Find out where task 0 runs, by Spark's internals: no public function tells."""
        with suppress(Exception):
            for task in _tasks(self._spark, stage, self._job.size):
                if task.index() == 0 and self._job.call is not None:
                    self.task_0 = str(task.host()), self._job.call

    def _tasks_have_started(self) -> None:
        self.expected = time.monotonic() + self._job.limits.first_report
        self.running = True
        self._wake()

    def _run(self) -> None:
        try:
            self._name_job()
            self._outcomes = [decode_outcome(bytes(row.outcome)) for row in self._collect()]
        except BaseException as error:
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        self.finished = True
        self._done.set()
        self._wake()

    def _name_job(self) -> None:
        text = f"HorovodRunner np={self._job.size}"
        context = self._spark.sparkContext
        context.setJobGroup(self._job.run_id, text, interruptOnCancel=True)

    def _collect(self) -> list[Any]:
        size = self._job.size
        if self._dataframes:
            from horovod_runner.data.read import spill

            tasks = spill.combine(self._dataframes, size)
        else:
            tasks = self._spark.range(0, size, 1, size)
        return _collect(tasks, self._task, self._profile, barrier=True)

    def outcomes(self) -> list[Outcome]:
        if self._error is None:
            return self._outcomes
        # Spark's text is a hundred lines of Java: it goes to the log, not into the error.
        _log.debug("Spark ended the job of run %s", self._job.run_id, exc_info=self._error)
        if isinstance(self._error, LaunchError):
            raise self._error
        lost = lost_task(self._error)
        if lost is not None:
            raise lost
        what = f"Spark ended the barrier job of run {self._job.run_id}"
        raise ended_by(what, self._error) from None

    def cancel(self) -> None:
        """Cancel the Spark job. Spark then kills its tasks, and the workers end with them."""
        _cancel(self._spark, self._job.run_id)


class ConnectLaunch(SparkLaunch):
    """One barrier job that a Connect server runs for this process.

    Args:
        late: the error to raise if no task has started within ``seconds``.
        seconds: the time limit for the first task.
    """

    def __init__(
        self,
        spark: SparkSession,
        request: LaunchRequest,
        task: Callable[..., Any],
        profile: ResourceProfile | None,
        *,
        late: SlotError,
        seconds: float,
    ) -> None:
        self._late = late
        self._tag = f"horovod_runner-{request.job.run_id}"
        self._tags = {*spark.getTags(), self._tag}
        self._thread = 0  # that collects
        # Spark tells Connect clients from 4.0 on when it has started tasks.
        self._told_of_starts = hasattr(spark, "registerProgressHandler")
        if self._told_of_starts:
            self.expected = time.monotonic() + seconds
        super().__init__(spark, request, task, profile, detaches=False)  # the server tells of it
        endpoint = connect.server_endpoint(spark)
        if endpoint is not None:
            patience = request.job.limits.connect_server
            connect.watch_server(endpoint, self._done, self._lost_server, patience)

    def late_error(self) -> SlotError:
        return self._late

    def _name_job(self) -> None:
        for tag in self._tags:  # a tag belongs to the thread that sets it
            self._spark.addTag(tag)

    def _collect(self) -> list[Any]:
        if not self._told_of_starts:
            return super()._collect()
        self._thread = threading.get_ident()
        spark: Any = self._spark
        spark.registerProgressHandler(self._on_progress)
        try:
            return super()._collect()
        finally:
            spark.removeProgressHandler(self._on_progress)

    def _on_progress(self, *, inflight_tasks: int, **_: Any) -> None:
        # Handlers are called for all jobs of the session, each in the thread that waits for it.
        here = threading.get_ident() == self._thread
        if here and not self.running and inflight_tasks >= self._job.size:
            self._tasks_have_started()

    def _lost_server(self, reason: str) -> None:
        self._error = LaunchLostError(reason)
        self._end()

    def cancel(self) -> None:
        """Have the server cancel the job."""
        # In a thread: the client retries for ten minutes if the server does not answer.
        threading.Thread(target=self._interrupt, daemon=True).start()

    def _interrupt(self) -> None:
        with suppress(Exception):  # the session or the server has ended, and the job with it
            self._spark.interruptTag(self._tag)


def _collect(
    rows: DataFrame, task: Callable[..., Any], profile: ResourceProfile | None, **barrier: bool
) -> list[Any]:
    # Spark 3.5 has no such argument.
    resources = {} if profile is None else {"profile": profile}
    return collect_in_arrow(rows, task, _OUTCOME_SCHEMA, **barrier, **resources)


def _cancel(spark: SparkSession, group: str) -> None:
    with suppress(Exception):  # the session has ended, and its jobs with it
        spark.sparkContext.cancelJobGroup(group)


def _stages(spark: SparkSession, group: str) -> Iterator[SparkStageInfo]:
    """The stages of a job group that Spark still knows."""
    tracker = spark.sparkContext.statusTracker()
    for job in map(tracker.getJobInfo, tracker.getJobIdsForGroup(group)):
        for stage in job.stageIds if job is not None else ():
            info = tracker.getStageInfo(stage)
            if info is not None:
                yield info


def _tasks(spark: SparkSession, stage: SparkStageInfo, most: int) -> Iterator[Any]:
    store = spark.sparkContext._jsc.sc().statusStore()
    tasks = store.taskList(stage.stageId, stage.currentAttemptId, most)
    yield from map(tasks.apply, range(tasks.size()))


def _start_inheriting_thread(
    spark: SparkSession, target: Callable[..., object], *args: object
) -> threading.Thread:
    """Start a daemon thread that inherits the caller's job properties (pool, description)."""
    make: Callable[..., threading.Thread] = threading.Thread
    if spark_context(spark) is not None:  # Spark Connect has no such properties
        from pyspark import InheritableThread

        make = InheritableThread
    thread = make(target=target, args=args)
    thread.daemon = True
    thread.start()
    return thread


class SparkMembers(MemberTasks):
    """The tasks of a pool: one ordinary Spark job each.

    So Spark runs a task again elsewhere when its executor is lost, and starts executors for tasks
    that wait for a slot (dynamic allocation).
    """

    def __init__(
        self,
        spark: SparkSession,
        request: PoolRequest,
        tasks: Sequence[Callable[..., Any]],
        profile: ResourceProfile | None,
    ) -> None:
        self._spark = spark
        self._job = request.job
        self._profile = profile
        self._ended = request.ended
        self._leaving = request.leaving
        self._over = threading.Event()
        self._collecting: set[int] = set()  # the seats with a job whose end is not reported
        self._threads: list[threading.Thread] = []
        for seat, task in enumerate(tasks):
            self._threads.append(_start_inheriting_thread(spark, self._keep, seat, task))
        if (conf_of(spark, "spark.decommission.enabled") or "").lower() == "true":
            start_thread("decommission", self._watch)

    def _group(self, seat: int) -> str:
        return f"{self._job.run_id}-{seat}"

    def _keep(self, seat: int, task: Callable[..., Any]) -> None:
        """Run a seat's job, again and again until the pool is closed or somebody cancels it."""
        text = f"HorovodRunner np={self._job.options.np}, task {seat}"
        self._spark.sparkContext.setJobGroup(self._group(seat), text, interruptOnCancel=True)
        while not self._over.is_set():
            reason = LaunchError("a task of the run has ended: it had lost the driver.")
            self._collecting.add(seat)
            try:
                one = self._spark.range(seat, seat + 1, 1, 1)
                _collect(one, task, self._profile)
            except BaseException as error:
                _log.debug("Spark ended task %d of %s", seat, self._job.run_id, exc_info=error)
                reason = ended_by("Spark ended a task of the run", error)
            if not self._over.is_set():
                self._ended(seat, reason)
                self._collecting.discard(seat)
                if isinstance(reason, JobCancelledError):
                    return
                self._over.wait(_AGAIN_SECONDS)

    def settled(self) -> bool:
        with suppress(Exception):  # the session has ended
            return all(self._runs(seat) for seat in list(self._collecting))
        return True

    def _runs(self, seat: int) -> bool:
        """Whether Spark runs the job of a seat, or does not know of it yet."""
        tracker = self._spark.sparkContext.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group(seat)))
        states = [job.status for job in jobs if job is not None]
        return not states or "RUNNING" in states

    def _watch(self) -> None:
        try:
            while not self._over.wait(_WATCH_SECONDS):
                for executor in self._decommissioned():
                    for seat in self._seats_on(executor):
                        self._leaving(seat, f"executor {executor} is being decommissioned")
        except Exception:  # the session has ended, or this Spark has other internals
            _log.debug("executors cannot be watched", exc_info=True)

    def _decommissioned(self) -> list[str]:
        context = self._spark.sparkContext._jsc.sc()
        ids = context.getExecutorIds()
        executors = [str(ids.apply(at)) for at in range(ids.size())]
        scheduler = context.taskScheduler()
        return [
            executor
            for executor in executors
            if scheduler.getExecutorDecommissionState(executor).isDefined()
        ]

    def _seats_on(self, executor: str) -> list[int]:
        return [
            seat
            for seat in range(len(self._threads))
            for stage in _stages(self._spark, self._group(seat))
            if any(
                task.executorId() == executor and task.status() == "RUNNING"
                for task in _tasks(self._spark, stage, 100)
            )
        ]

    def close(self, served: Collection[int], seconds: float) -> None:
        self._over.set()
        for seat in range(len(self._threads)):
            if seat not in served:
                _cancel(self._spark, self._group(seat))
        until = time.monotonic() + seconds
        for seat, thread in enumerate(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
            while thread.is_alive() and time.monotonic() < until + seconds:
                # Again and again: Spark may not have known the job yet when it was asked.
                _cancel(self._spark, self._group(seat))
                thread.join(0.5)
