"""The Spark launcher: one barrier job, with one task per rank; or one job per task of a pool.

``range(size).mapInArrow(task, barrier=True)`` starts all tasks together, and returns each task's
outcome as a row, over Spark's authenticated connections. A task never raises for what its rank
does: it returns the outcome, so Spark has nothing to retry.

Only DataFrame methods that Spark Connect has too are used; what needs the JVM is guarded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.spark_session import conf_of, spark_context
from horovod_runner.common.text import count_text
from horovod_runner.driver.launcher import LaunchRequest, PoolKeeper, PoolRequest
from horovod_runner.errors import CancelledError, LaunchError, SlotError
from horovod_runner.launchers import connect, engine, growth
from horovod_runner.launchers.spark_job import ConnectLaunch, SparkLaunch, SparkMembers
from horovod_runner.launchers.spark_task import run_member, run_task
from horovod_runner.wire.job import Job
from horovod_runner.wire.transport import new_call

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

#: Settings that name files which Spark puts into the executors' working folders.
_SHIPPED = ("spark.files", "spark.archives", "spark.yarn.dist.files", "spark.yarn.dist.archives")


class SparkLauncher(PoolKeeper):
    """Starts ranks as the tasks of a barrier job.

    Args:
        slot_timeout: seconds to wait for slots that a cluster may still bring up. None waits for
            executors that YARN or Kubernetes was asked for, elsewhere only in the first 30 s after
            the driver has joined the cluster, and on ``local[n]`` not at all.

    Raises:
        ValueError: this version of Spark accepts no profile.
    """

    def __init__(
        self,
        spark: SparkSession,
        slot_timeout: float | None,
        notice: Callable[[str], None],
        cancelled: threading.Event,
        *,
        profile: ResourceProfile | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        if profile is not None and int(spark.version.partition(".")[0]) < 4:
            raise ValueError(
                f"resource_profile requires Spark 4.0 or later, and this is {spark.version}: set "
                "the resources of a task with spark.task.cpus and spark.task.resource.gpu.amount"
            )
        self._limits = limits
        self._profile = profile
        self._spark = spark
        self._slot_timeout = slot_timeout
        self._notice = notice
        self._cancelled = cancelled
        self.where = conf_of(spark, "spark.master") or ""
        self._is_local = self.where.startswith("local") and "cluster" not in self.where
        self._is_connect = spark_context(spark) is None
        requests = profile.taskResources.values() if profile is not None else ()
        self._asked = None
        if not self._is_connect:  # a Connect server does not tell how many executors run
            self._asked = growth.asked_of(
                partial(conf_of, spark), {each.resourceName: each.amount for each in requests}
            )
        dynamic = conf_of(spark, "spark.dynamicAllocation.enabled") or ""
        # Spark starts no barrier job under dynamic allocation, and executors only for jobs.
        self.needs_pool = dynamic.lower() == "true" and not self._is_local
        # A Connect server may be on another machine.
        self.shares_files = self._is_local and not self._is_connect
        self.driver_logs = "" if self._is_connect else growth.driver_logs(partial(conf_of, spark))
        self.channel_host = "127.0.0.1"
        if self._is_connect or not self._is_local:
            named = None if self._is_local else conf_of(spark, "spark.driver.host")
            self.channel_host = connect.driver_host(spark, named or self.channel_host)

    def slots(self, size: int, patience: float = 0.0) -> int:
        if self._is_connect:
            self._check_compute()
        began = noticed = time.monotonic()
        seconds, growing = max(self._patience(), patience), self._slot_timeout
        if growing is None:  # for slots that are on their way
            growing = self._limits.granted_executors
        told = ""
        while True:
            available = self._count_slots()
            if available is None:
                return self._unknown_slots(size)
            # Asked only where it matters: it is a call of Java.
            executors = engine.count_executors(self._spark) if self._asked is not None else None
            comes = growth.is_on_its_way(self._asked, executors, size)
            waited = time.monotonic() - began
            over = waited >= (max(seconds, growing) if comes else seconds)
            if available >= max(1, size) and (size or over or not comes):
                return size or available
            if over:
                raise self._too_few(size, available, waited)
            if time.monotonic() - noticed > self._limits.slot_notice:
                noticed = time.monotonic()
                missing = f"waiting for slots: {available} of {size or 'all'}"
                if comes:
                    missing += f". {self.why_missing()}"
                if missing != told:
                    told = missing
                    self._notice(missing)
            # Spark offers no event for new executors.
            if self._cancelled.wait(1.0 if self._is_connect else 0.2):
                raise CancelledError("the run was cancelled while it waited for slots")

    def _check_compute(self) -> None:
        compute = connect.sandboxed_compute()
        if compute is None:
            return
        why = "runs Python functions in sandboxes that cannot start ranks"
        advice = (
            "Attach the notebook to classic compute with dedicated access mode and an ML runtime, "
            "or run on the driver with a negative np."
        )
        if compute == "serverless compute":
            raise LaunchError(f"Databricks' {compute} {why}. {advice}")
        self._notice(
            f"a Spark Connect session on a Databricks runtime means {compute} as a rule, which "
            f"{why}. If this run fails for that reason: {advice[0].lower()}{advice[1:]}"
        )

    def _patience(self) -> float:
        """How long to wait for slots, in seconds."""
        if self._slot_timeout is not None:
            return self._slot_timeout
        if self._is_local or self._asked is not None:
            return 0.0
        joined, limit = self._joined(), self._limits.executors
        age = limit if joined is None else time.time() - joined
        return min(limit, max(0.0, limit - age))

    def why_missing(self) -> str:
        """How many executors the engine has granted, and why not all; see PoolKeeper."""
        executors = engine.count_executors(self._spark)
        if self._asked is None or executors is None or executors >= self._asked.executors:
            return ""
        granted = f"{executors} of {count_text(self._asked.executors, 'executor')} run"
        return " ".join(filter(None, (f"{granted}.", engine.why_missing(self._spark))))

    def _joined(self) -> float | None:
        """When the driver joined the cluster, in seconds since 1970; None if it is not known.

        The application may have begun long before: the driver unpacks ``--archives`` first. On
        Spark Connect only that beginning is known.
        """
        if not self._is_connect:
            with suppress(Exception):
                return _joined(self._spark)
        started = conf_of(self._spark, "spark.app.startTime")
        return int(started) / 1000 if started else None

    def _count_slots(self) -> int | None:
        if not self._is_connect:
            return _count_slots(self._spark, self._profile)
        return connect.count_slots(self._spark) if self._profile is None else None

    def _unknown_slots(self, size: int) -> int:
        if size == 0:
            raise SlotError(
                "np=0 asks for all slots, and this Spark does not tell how many it has: give np as "
                "a number."
            )
        return size

    def _too_few(self, size: int, available: int, waited: float) -> SlotError:
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
            if available == 0:
                advice += (
                    ". As there is not a single one, check whether executors can reach the driver "
                    f"at spark.driver.host={self.channel_host}"
                )
        after = f" after {waited:.0f} s" if self._asked is not None else ""
        asked = f" The session has {self._asked}." if self._asked is not None else ""
        granted = self.why_missing()
        return SlotError(
            f"np={size or 'all slots'} asks for {max(1, size)} slot(s) and {self.where} has "
            f"{available}{after}.{asked}{' ' if granted else ''}{granted} A slot is what one task "
            f"takes: {self._task_resources()}. Lower np, or {advice}."
        )

    def _task_resources(self) -> str:
        if self._profile is not None:
            requests = self._profile.taskResources.values()
            return ", ".join(f"{request.resourceName} {request.amount:g}" for request in requests)
        gpus = conf_of(self._spark, "spark.task.resource.gpu.amount")
        return f"spark.task.cpus={conf_of(self._spark, 'spark.task.cpus') or '1'}" + (
            f" and spark.task.resource.gpu.amount={gpus}" if gpus else ""
        )

    def launch(self, request: LaunchRequest) -> SparkLaunch:
        """Start the barrier job, in a separate thread."""
        job = self._with_threads(request.job)
        # On a local master the tasks are on this machine.
        detaches = not self.shares_files
        if detaches and not self._is_connect:
            job = replace(job, call=new_call())
        request = replace(request, job=job)
        task = partial(
            run_task,
            job,
            request.address,
            # On a local master what a task prints appears in this terminal anyway. The log of a
            # Connect server does not.
            echo=self._is_connect or not self._is_local,
            stays=self._ships_files(),
            detaches=detaches,
            dataframes=tuple(request.dataframes),
        )
        if not self._is_connect:
            return SparkLaunch(self._spark, request, task, self._profile, detaches=detaches)
        seconds = max(self._limits.connect_task, self._slot_timeout or 0.0)
        late = self._late_error(job.size, seconds)
        return ConnectLaunch(self._spark, request, task, self._profile, late=late, seconds=seconds)

    def check_pool(self, least: int) -> None:
        if not self._is_connect:
            if least == 0:
                raise SlotError(
                    "np=0, or no num_proc, asks for all slots, and under dynamic allocation "
                    "(spark.dynamicAllocation.enabled) there are none before a run asks for them: "
                    "give np as a number, or as a range such as (2, 8)."
                )
            self._refuse_copies()
            if self.needs_pool and self._asked is not None and self._asked.slots < least:
                raise SlotError(
                    f"the run needs at least {count_text(least, 'slot')}, and the session never "
                    f"has more than {self._asked.slots}: {self._asked}. Raise that setting or "
                    "spark.executor.cores, or lower np."
                )
            return
        if self.needs_pool:
            raise SlotError(
                "spark.dynamicAllocation.enabled is true, and Spark starts no barrier job under "
                "dynamic allocation. On Spark Connect set it to false and ask for a fixed number "
                "of executors (spark.executor.instances); on a classic session it may be true."
            )
        raise SlotError(
            "a range of np needs a classic Spark session: a Connect server does not tell which "
            "executors have gone. Give np as a number, or run the driver beside the cluster "
            "(spark-submit)."
        )

    def _refuse_copies(self) -> None:
        """Refuse settings by which Spark starts a second copy of a task that runs for long.

        Spark makes no copies of the tasks of a barrier job.
        """
        threshold = conf_of(self._spark, "spark.speculation.task.duration.threshold")
        speculates = (conf_of(self._spark, "spark.speculation") or "").lower() == "true"
        if speculates and threshold is not None:
            raise SlotError(
                f"spark.speculation.task.duration.threshold={threshold} with spark.speculation: "
                "Spark would start a second copy of each task of this run after that time, as they "
                "run until its end. Start the session without one of the two settings, or, with a "
                "fixed number of executors, give np as a number."
            )

    def expected_tasks(self) -> int | None:
        """As many as there are slots, or will be with the executors that were asked for."""
        if self._asked is not None:
            return self._asked.slots
        return None if self.needs_pool else self._count_slots()

    def launch_members(self, request: PoolRequest) -> SparkMembers:
        """Start one job for each seat."""
        job = self._with_threads(request.job)
        tasks = [
            partial(
                run_member,
                job,
                request.address,
                seat,
                echo=not self._is_local,
                stays=self._ships_files(),
            )
            for seat in range(request.seats)
        ]
        return SparkMembers(self._spark, replace(request, job=job), tasks, self._profile)

    def _ships_files(self) -> bool:
        """Whether Spark puts files of the application into the executors' working folders."""
        return not self._is_local and any(conf_of(self._spark, name) for name in _SHIPPED)

    def _with_threads(self, job: Job) -> Job:
        """The job with the number of threads that the user chose for all executors, if any."""
        threads = conf_of(self._spark, "spark.executorEnv.OMP_NUM_THREADS")
        if threads is None:
            return job
        # Spark sets this variable in every task. Only this setting shows that the user did.
        return replace(job, environment={"OMP_NUM_THREADS": threads, **job.environment})

    def _late_error(self, size: int, seconds: float) -> SlotError:
        return SlotError(
            f"np={size}: Spark has started no task within {seconds:g} s. It starts all tasks of "
            f"a barrier job together: {self.where} has fewer than {size} free slots, because it is "
            "too small or because other jobs hold them. A slot is what one task takes: "
            f"{self._task_resources()}. Lower np, add executors or cores, or raise slot_timeout to "
            "wait longer."
        )


# Spark's internals are used from here on, and in no other place of this file: no public function
# counts slots with GPUs in mind, or tells when the driver has joined.


def _joined(spark: SparkSession) -> float:
    summary = spark.sparkContext._jsc.sc().statusStore().executorSummary("driver")
    return int(summary.addTime().getTime()) / 1000


def _count_slots(spark: SparkSession, profile: ResourceProfile | None) -> int | None:
    try:
        scala_context = spark.sparkContext._jsc.sc()
        manager = scala_context.resourceProfileManager()
        java_profile = manager.defaultResourceProfile()
        if profile is not None:
            java_profile = profile._java_resource_profile
            manager.addResourceProfile(java_profile)  # otherwise only the first job registers it
        return int(scala_context.maxNumConcurrentTasks(java_profile))
    except Exception:
        return None
