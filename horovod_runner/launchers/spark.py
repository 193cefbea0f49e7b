"""The Spark launcher: one barrier job, a task a rank.

``range(size).mapInArrow(task, barrier=True)`` starts all tasks together, and carries each one's
outcome back as a row over Spark's own authenticated connections. A task never raises for what its
rank does: it returns the outcome, so Spark has nothing to retry. Only DataFrame calls that Spark
Connect has too; what needs the JVM is marked and guarded, and what Connect needs is in
:mod:`~horovod_runner.launchers.connect`.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from horovod_runner.channel import ChannelAddress
from horovod_runner.errors import CancelledError, LaunchError, SlotError
from horovod_runner.job import Job, Outcome, user_path
from horovod_runner.launchers import LaunchLostError, TaskLostError, apart, connect
from horovod_runner.process import without_spark_core
from horovod_runner.rank import Surroundings, run_rank, stderr_echo
from horovod_runner.session import conf_of, map_in_arrow, spark_context

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)
_STARTUP_SECONDS = 30.0  # how long a new application's executors may take to register
_PROGRESS_SECONDS = 5.0
_FIRST_TASK_SECONDS = 60.0
_HELLO_SECONDS = 30.0  # from a task's start to its hello; a Python worker may start slowly
_OUTCOME_SCHEMA = "outcome binary"
# "...barrier task ResultTask(7, 3) finished unsuccessfully.\nExecutorLostFailure (executor 1 ..."
_LOST_TASK = re.compile(
    r"barrier task \w+\(\d+, (?P<task>\d+)\) finished unsuccessfully\.\s*"
    r"(?P<reason>ExecutorLostFailure.*|.*Python worker exited unexpectedly.*)"
)


class SparkLauncher:
    """Starts ranks as the tasks of a barrier job.

    Args:
        spark: the session.
        slot_timeout: how many seconds to wait for slots that a cluster may still bring up. None
            waits only while the application is young, and on ``local[n]`` not at all.
        notice: takes a line for the user.
        cancelled: ends the wait when it is set.
        deputy: stands in for the driver, in a task, where no task can reach it (Spark Connect).
        profile: what a task takes, instead of the application's settings.

    Raises:
        ValueError: this Spark takes no profile.
    """

    def __init__(
        self,
        spark: SparkSession,
        slot_timeout: float | None,
        notice: Callable[[str], None],
        cancelled: threading.Event,
        deputy: Callable[[Job, str], apart.Deputy] | None = None,
        *,
        profile: ResourceProfile | None = None,
    ) -> None:
        if profile is not None and int(spark.version.partition(".")[0]) < 4:
            raise ValueError(
                f"resource_profile takes Spark 4.0 or later, and this is {spark.version}: say what "
                "a task takes by spark.task.cpus and spark.task.resource.gpu.amount"
            )
        self._profile = profile
        self._deputy = deputy
        self._spark = spark
        self._slot_timeout = slot_timeout
        self._notice = notice
        self._cancelled = cancelled
        self.where = conf_of(spark, "spark.master") or ""
        self._is_local = self.where.startswith("local") and "cluster" not in self.where
        self._is_connect = spark_context(spark) is None
        self.frames: Mapping[str, DataFrame] = {}  # that come through the barrier job
        # A Connect server may be on another machine.
        self.shares_files = self._is_local and not self._is_connect
        named = None if self._is_local else conf_of(spark, "spark.driver.host")
        self.channel_host = named or "127.0.0.1"
        if self._is_connect:
            self.channel_host = connect.driver_host(spark, self.channel_host)

    def slots(self, size: int, patience: float = 0.0) -> int:
        """See :class:`~horovod_runner.launchers.Launcher`."""
        dynamic = conf_of(self._spark, "spark.dynamicAllocation.enabled") or ""
        if dynamic.lower() == "true" and not self._is_local:
            raise SlotError(
                "spark.dynamicAllocation.enabled is true, and Spark starts no barrier job under "
                "dynamic allocation. Set it to false and ask for a fixed number of executors "
                "(spark.executor.instances, or spark.cores.max on a standalone cluster)."
            )
        deadline = time.monotonic() + max(self._patience(), patience)
        said = time.monotonic()
        while True:
            there = self._count_slots()
            if there is None:
                return self._unknown_slots(size)
            if there >= max(1, size):
                return size or there
            if time.monotonic() >= deadline:
                raise self._too_few(size, there)
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                self._notice(f"waiting for slots: {there} of {max(1, size)}")
            # Spark offers no event for executors that come.
            if self._cancelled.wait(1.0 if self._is_connect else 0.2):
                raise CancelledError("the run was cancelled while it waited for slots")

    def _patience(self) -> float:
        if self._slot_timeout is not None:
            return self._slot_timeout
        if self._is_local:
            return 0.0
        started = conf_of(self._spark, "spark.app.startTime")
        age = time.time() - int(started) / 1000 if started else _STARTUP_SECONDS
        return min(_STARTUP_SECONDS, max(0.0, _STARTUP_SECONDS - age))

    def _count_slots(self) -> int | None:
        """How many tasks run at a time; None where Spark does not tell."""
        if not self._is_connect:
            return _count_slots(self._spark, self._profile)
        return connect.count_slots(self._spark) if self._profile is None else None

    def _unknown_slots(self, size: int) -> int:
        if size == 0:
            raise SlotError("this Spark does not tell how many slots it has: give np as a number.")
        return size

    def _too_few(self, size: int, there: int) -> SlotError:
        if self._is_local and self._is_connect:
            advice = f"start the Connect server with --master 'local[{size}]'"
        elif self._is_local:
            advice = (
                f'start the session with master("local[{size}]"), '
                f"or spark-submit with --master 'local[{size}]'"
            )
        else:
            advice = (
                "add executors or cores (spark.executor.instances, spark.executor.cores, "
                "spark.cores.max), or raise slot_timeout if the cluster is still growing"
            )
            if there == 0:
                advice += (
                    ". Without a single one, look whether executors can reach the driver at "
                    f"spark.driver.host={self.channel_host}"
                )
        return SlotError(
            f"np={size or 'all slots'} asks for {max(1, size)} slot(s) and {self.where} has "
            f"{there}. A slot is what one task takes: {self._need()}. Lower np, or {advice}."
        )

    def _need(self) -> str:
        if self._profile is not None:
            taken = self._profile.taskResources.values()
            return ", ".join(f"{each.resourceName} {each.amount:g}" for each in taken)
        gpus = conf_of(self._spark, "spark.task.resource.gpu.amount")
        return f"spark.task.cpus={conf_of(self._spark, 'spark.task.cpus') or '1'}" + (
            f" and spark.task.resource.gpu.amount={gpus}" if gpus else ""
        )

    def launch(self, job: Job, address: ChannelAddress, wake: Callable[[], None]) -> SparkLaunch:
        """Start the barrier job in a thread of its own."""
        threads = conf_of(self._spark, "spark.executorEnv.OMP_NUM_THREADS")
        if threads is not None:
            # Spark sets this variable in every task; that the user did shows here alone.
            job = replace(job, environment={"OMP_NUM_THREADS": threads, **job.environment})
        deputy = self._deputy if self._is_connect else None
        echo = self._is_connect or not self._is_local  # else it is this process's own terminal
        task = partial(_run_task, job, address, echo=echo, deputy=deputy, frames=tuple(self.frames))
        if not self._is_connect:
            return SparkLaunch(self._spark, job, task, wake, self.frames, profile=self._profile)
        seconds = max(_FIRST_TASK_SECONDS, self._slot_timeout or 0.0)
        late = SlotError(
            f"np={job.size}: Spark has started no task within {seconds:.0f} s. It starts all tasks "
            f"of a barrier job together: {self.where} has fewer than {job.size} free slots, "
            f"because it is too small or because other jobs hold them. A slot is what one task "
            f"takes: {self._need()}. Lower np, add executors or cores, or raise slot_timeout "
            "to wait longer."
        )
        return ConnectLaunch(
            self._spark,
            job,
            task,
            wake,
            self.frames,
            profile=self._profile,
            late=late,
            seconds=seconds,
        )


class SparkLaunch:
    """One barrier job under way."""

    late: SlotError | None = None
    # A SparkContext counts the slots exactly: the tasks start when other jobs let them.
    expected: float | None = None
    running = False

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        task: Callable[..., Any],
        wake: Callable[[], None],
        frames: Mapping[str, DataFrame],
        *,
        profile: ResourceProfile | None,
    ) -> None:
        self._profile = profile
        self._spark = spark
        self._job = job
        self._frames = frames
        self._task = task
        self._wake = wake
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        thread = _inheriting_thread(spark)(target=self._run)
        thread.daemon = True
        thread.start()

    def _run(self) -> None:
        try:
            self._name_job()
            self._outcomes = [
                msgspec.msgpack.decode(bytes(row.outcome), type=Outcome) for row in self._collect()
            ]
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            self._wake()

    def _collect(self) -> list[Any]:
        return self._job_frame().collect()  # type: ignore[no-any-return]

    def _job_frame(self) -> DataFrame:
        """The barrier job as a DataFrame; nothing runs yet."""
        size = self._job.size
        if self._frames:
            from horovod_runner.data import spill

            tasks = spill.combine(self._frames, size)
        else:
            tasks = self._spark.range(0, size, 1, size)
        # Spark 3.5 knows no such argument.
        profile = {} if self._profile is None else {"profile": self._profile}
        return map_in_arrow(tasks, self._task, _OUTCOME_SCHEMA, barrier=True, **profile)

    def _name_job(self) -> None:
        text = f"HorovodRunner np={self._job.size}"
        context = self._spark.sparkContext
        context.setJobGroup(self._job.run_id, text, interruptOnCancel=True)

    @property
    def finished(self) -> bool:
        """Whether the Spark job has ended."""
        return self._done.is_set()

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended.

        Raises:
            TaskLostError: an executor was lost.
            LaunchError: Spark ended the job before the ranks did.
        """
        if self._error is None:
            return self._outcomes
        # Spark's own text is a hundred lines of Java: for the log, not for the error.
        _log.debug("Spark ended the job of run %s", self._job.run_id, exc_info=self._error)
        if isinstance(self._error, LaunchError):
            raise self._error
        lost = _LOST_TASK.search(str(self._error))
        if lost:
            raise TaskLostError(int(lost["task"]), f"Spark says: {lost['reason'].strip()}.")
        raise LaunchError(
            f"Spark ended the barrier job of run {self._job.run_id}: {_explain(self._error)}"
        ) from None

    def cancel(self) -> None:
        """Cancel the Spark job; Spark then kills its tasks, and the workers go with them."""
        self._spark.sparkContext.cancelJobGroup(self._job.run_id)


class ConnectLaunch(SparkLaunch):
    """One barrier job that a Connect server runs for this process.

    Args:
        late: what to say if no task has started within ``seconds``.
    """

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        task: Callable[..., Any],
        wake: Callable[[], None],
        frames: Mapping[str, DataFrame],
        *,
        profile: ResourceProfile | None,
        late: SlotError,
        seconds: float,
    ) -> None:
        self.late = late
        self._start_by = time.monotonic() + seconds
        self._tag = f"horovod_runner-{job.run_id}"
        self._tags = {*spark.getTags(), self._tag}
        self._progress = connect.TaskProgress(spark, job.size, wake)
        super().__init__(spark, job, task, wake, frames, profile=profile)
        endpoint = connect.server_endpoint(spark)
        if endpoint is not None:
            connect.Lookout(endpoint, self._done, self._lost_server)

    def _name_job(self) -> None:
        for tag in self._tags:  # a tag belongs to the thread that sets it
            self._spark.addTag(tag)

    def _collect(self) -> list[Any]:
        with self._progress:
            return super()._collect()

    def _lost_server(self, reason: str) -> None:
        self._error = LaunchLostError(reason)
        self._done.set()
        self._wake()

    @property
    def running(self) -> bool:  # type: ignore[override]
        """Whether Spark has told that all tasks have been started."""
        return self._progress.started is not None

    @property
    def expected(self) -> float | None:  # type: ignore[override]
        """By when a task should have said hello; None where Spark does not tell that it started."""
        if self._progress.started is not None:
            return self._progress.started + _HELLO_SECONDS
        return self._start_by if self._progress.told else None

    def cancel(self) -> None:
        """Have the server cancel the job."""
        # In a thread: of a server that does not answer the client asks again for ten minutes.
        threading.Thread(target=self._interrupt, daemon=True).start()

    def _interrupt(self) -> None:
        with suppress(Exception):  # the session or the server has ended, and with it the job
            self._spark.interruptTag(self._tag)


def _run_task(
    job: Job,
    address: ChannelAddress,
    batches: Iterator[pa.RecordBatch],
    *,
    echo: bool,
    deputy: Callable[[Job, str], apart.Deputy] | None,
    frames: tuple[str, ...],
) -> Iterator[pa.RecordBatch]:
    """The body of one Spark task."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    take_in = None
    if frames:
        from horovod_runner.data import spill

        # Once, though the rank may begin a second time, with the driver's deputy.
        take_in = cache(
            lambda folder: spill.take_in(frames, folder, context.partitionId(), batches)
        )
    else:
        for _ in batches:
            pass  # one row, the task's number, which the context knows as well
    resources = context.resources()
    without_driver = None if deputy is None else apart.Apart(job, context, deputy)
    here = Surroundings(
        context.partitionId(),
        path=[*without_spark_core(sys.path), *user_path(job.path)],
        # Not os.environ: Spark sets OMP_NUM_THREADS there by itself.
        user_environment=job.environment,
        task_gpus=tuple(resources["gpu"].addresses) if "gpu" in resources else (),
        echo=stderr_echo if echo else None,
        apart=without_driver,
        take_in=take_in,
        # Spark's daemon of Python workers, which its executor ends with the session; this process
        # itself may end with the next idle minute.
        owner=os.getppid(),
    )
    outcome = run_rank(job, address, here)
    if without_driver is not None:
        outcome = msgspec.structs.replace(outcome, record=without_driver.record)
    yield _batch_of(msgspec.msgpack.encode(outcome))


def _batch_of(value: bytes) -> pa.RecordBatch:
    """A batch of one row with one binary column.

    From buffers, because ``pa.array`` imports pandas: half a second in a fresh Python worker.
    """
    import pyarrow as pa

    offsets = struct.pack("=ii", 0, len(value))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(value)]
    return pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.binary(), 1, buffers)], names=["outcome"]
    )


def find_session() -> SparkSession:
    """The active session, or a new one as ``spark-submit`` or the defaults set it up.

    Raises:
        LaunchError: pyspark is not installed.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise LaunchError(
            "np above 0 runs on Spark, and pyspark is not installed: "
            "pip install horovod_runner[spark], or use np=-N for N ranks on this machine."
        ) from error
    try:
        return SparkSession.active()
    except Exception:  # none, and no class of its own for that in all versions
        return SparkSession.builder.getOrCreate()


def open_session(master: str, name: str, conf: Sequence[tuple[str, str]] = ()) -> SparkSession:
    """A session on a master, or on a Connect server (``sc://``).

    Args:
        master: its URL.
        name: the application's.
        conf: settings of Spark, by name.

    Raises:
        LaunchError: pyspark is not installed, or there is none at that URL.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise LaunchError("pyspark is not installed: pip install horovod_runner[spark]") from error
    builder = SparkSession.builder.appName(name)
    for key, value in conf:
        builder = builder.config(key, value)
    try:
        is_connect = master.startswith("sc://")
        builder = builder.remote(master) if is_connect else builder.master(master)
        return builder.getOrCreate()
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(f"no session on {master}: {first}. Is the master's URL right?") from error


def _count_slots(spark: SparkSession, profile: ResourceProfile | None) -> int | None:
    """How many tasks the cluster runs at a time; None where Spark does not tell.

    The one use of Spark's internals: no public call counts slots with GPUs in mind.
    """
    try:
        scala_context = spark.sparkContext._jsc.sc()
        manager = scala_context.resourceProfileManager()
        found = manager.defaultResourceProfile()
        if profile is not None:
            found = profile._java_resource_profile
            manager.addResourceProfile(found)  # or Spark knows it with its first job alone
        return int(scala_context.maxNumConcurrentTasks(found))
    except Exception:
        return None


def _inheriting_thread(spark: SparkSession) -> Callable[..., threading.Thread]:
    """Threads that share the caller's job properties (pool, description), where there are any."""
    if spark_context(spark) is None:
        return threading.Thread
    from pyspark import InheritableThread

    return InheritableThread  # type: ignore[no-any-return]


def _explain(error: BaseException) -> str:
    """What Spark's error says, in a line or two."""
    text = str(error)
    if "No module named 'horovod_runner'" in text:
        return (
            "the executors' Python has no horovod_runner. Install it there (pip install "
            "horovod_runner on every host), or name the Python that has it: PYSPARK_PYTHON "
            "(with Spark Connect, in the server's environment), spark.pyspark.python."
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        return (
            "the executors run another minor version of Python than the "
            f"{sys.version_info[0]}.{sys.version_info[1]} here, and PySpark wants the same. Name "
            "one that fits by PYSPARK_PYTHON (with Spark Connect, in the server's environment), "
            "or start this process with theirs."
        )
    if "Channel closed" in text or "closed channel" in text:  # by this process
        return "the session was stopped in the middle of the run."
    closed = re.search(r'^\s*details = "(.*)"$', text, re.MULTILINE)
    if closed:  # gRPC's own
        return (
            f"the connection to the Spark Connect server has ended: {closed.group(1)} "
            "Was the session stopped?"
        )
    # Py4J's first line only says that something went wrong in the JVM.
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("An error occurred while calling")]
    found = [(telling or [type(error).__name__])[0]]
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception): .*)$", text, re.MULTILINE)
    of_python = [line for line in errors if not line.startswith(("org.", "java.", "py4j."))]
    for line in of_python[-1:] or errors[:1]:
        if line not in found[0]:
            found.append(line)
    return f"{'; '.join(found)} The executors' logs in Spark's UI say more."
