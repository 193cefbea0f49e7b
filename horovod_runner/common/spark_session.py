"""Reads settings of a Spark session, and chooses the Python that its tasks run."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.common.threads import start_thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_AGAIN_SECONDS = 0.2
# Spark 4.1 and later: a session's own setting, and that of the application.
_KILL, _KILLS = (
    "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
    "spark.python.worker.killOnIdleTimeout",
)
_IDLE, _IDLES = (
    "spark.sql.execution.pyspark.udf.idleTimeoutSeconds",
    "spark.python.worker.idleTimeoutSeconds",
)
_RESULTS: Final = "spark.driver.maxResultSize"
_COPIES: Final = 4  # of what a job returns, in the memory of the driver's Java
_python_exec_lock = threading.Lock()  # a CrossValidator scores in several threads at once
# How many jobs have changed a setting of a session or an application, and its own value.
_jobs: dict[tuple[int, str], tuple[int, str | None]] = {}
_lock = threading.RLock()  # of these


@contextmanager
def _changed(
    key: tuple[int, str],
    value: str,
    read: Callable[[], str | None],
    write: Callable[[str | None], None],
) -> Iterator[None]:
    """Give a setting another value while a job of ours lasts; ``write(None)`` unsets it.

    The first job's begin finds the value that the last job's end gives back.
    """
    with _lock:
        count, own = _jobs.get(key) or (0, read())
        write(value)
        _jobs[key] = count + 1, own
    try:
        yield
    finally:
        with _lock, suppress(Exception):  # the session has ended
            count, own = _jobs.pop(key)
            if count > 1:
                _jobs[key] = count - 1, own
            else:
                write(own)


def conf_of(spark: SparkSession, name: str) -> str | None:
    """A setting of the session; None if it is not set.

    Spark Connect also returns settings of the server's SparkContext.
    """
    value = spark.conf.get(name, None)
    return None if value is None else str(value)


def spark_context(spark: SparkSession) -> Any:
    """The SparkContext of a classic session; None on Spark Connect, which has none."""
    try:
        return spark.sparkContext
    except Exception:
        return None


def quoted(name: str) -> str:
    """A column's name as Spark reads it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def is_on_this_machine(spark: SparkSession) -> bool:
    """Whether the session's tasks run on this machine: classic Spark on a ``local`` master."""
    context = spark_context(spark)
    return context is not None and str(context.master).startswith("local")


def with_fixed_files(dataframe: DataFrame) -> DataFrame:
    """A DataFrame that reads the files that its table has now, however often it is run.

    Otherwise Spark looks for the newest version of a Delta or Iceberg table at each query. Spark
    has no public function for it. What Spark plans anew while it runs (joins, sorts) is returned as
    it is, and so is a DataFrame of Spark Connect.
    """
    spark: Any = dataframe.sparkSession
    with suppress(Exception):  # Spark's internals; an error of the query itself comes up later
        query = dataframe._jdf.queryExecution()
        if query.executedPlan().nodeName() != "AdaptiveSparkPlan":
            schema = dataframe._jdf.schema()
            rows = spark._jsparkSession.internalCreateDataFrame(query.toRdd(), schema, False)
            return type(dataframe)(rows, spark)
    return dataframe


def map_in_arrow(
    dataframe: DataFrame, function: Callable[[Any], Any], schema: str, **options: Any
) -> DataFrame:
    """Call ``dataframe.mapInArrow(...)`` so that its tasks run this Python on ``local[n]``.

    PySpark 4 warns about pandas 3 at every call, although Arrow batches involve no pandas.
    """
    with current_python(dataframe.sparkSession), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        return dataframe.mapInArrow(function, schema, **options)


def collect_in_arrow(
    dataframe: DataFrame, function: Callable[[Any], Any], schema: str, **options: Any
) -> list[Any]:
    """Run a job of ``map_in_arrow`` without settings that may end it; returns its rows.

    Its tasks may send nothing for long, and return more than other jobs of the application.
    """
    spark = dataframe.sparkSession
    with _idle_workers_live(spark), _large_results(spark):
        return map_in_arrow(dataframe, function, schema, **options).collect()  # type: ignore[no-any-return]


def let_idle_workers_live(spark: SparkSession) -> str | None:
    """Have a session kill no idle Python workers from now on: the user's queries are run later.

    Returns:
        After how many seconds it would have killed them; None: it kills none.
    """
    key = id(spark), _KILL
    with _lock:
        count, own = _jobs.get(key, (0, None))
        if own == "false" or (not count and not _kills_idle_workers(spark)):
            return None
        if count:
            _jobs[key] = count, "false"
        spark.conf.set(_KILL, "false")
        return _idle_seconds(spark)


def _kills_idle_workers(spark: SparkSession) -> bool:
    kills = conf_of(spark, _KILL) or conf_of(spark, _KILLS) or ""
    return kills.lower() == "true" and _idle_seconds(spark) != "0"


def _idle_seconds(spark: SparkSession) -> str:
    return (conf_of(spark, _IDLE) or conf_of(spark, _IDLES) or "0").rstrip("s")


@contextmanager
def _idle_workers_live(spark: SparkSession) -> Iterator[None]:
    """Have a session kill no idle Python workers while a job lasts.

    Spark reads the setting when a job begins: other queries that begin meanwhile have it, too.
    """

    def write(value: str | None) -> None:
        if value is None:
            spark.conf.unset(_KILL)
        else:
            spark.conf.set(_KILL, value)

    key = id(spark), _KILL
    with ExitStack() as stack:
        with _lock:
            if key in _jobs or _kills_idle_workers(spark):
                read = partial(conf_of, spark, _KILL)
                stack.enter_context(_changed(key, "false", read, write))
        yield


@contextmanager
def _large_results(spark: SparkSession) -> Iterator[None]:
    """Raise the limit of what a job may return to what the driver's memory holds.

    Spark reads the setting when a stage begins. No public function changes it.
    """
    with ExitStack() as stack:
        with suppress(Exception):  # Spark Connect, or other internals
            context = spark.sparkContext
            conf = context._jsc.sc().conf()
            room = int(context._jvm.Runtime.getRuntime().maxMemory()) // _COPIES
            own = int(conf.getSizeAsBytes(_RESULTS, "1g"))
            key = id(context), _RESULTS
            if key in _jobs or 0 < own < room:

                def write(value: str | None) -> None:
                    conf.remove(_RESULTS) if value is None else conf.set(_RESULTS, value)

                read = partial(conf.get, _RESULTS, None)
                stack.enter_context(_changed(key, str(room), read, write))
        yield


@contextmanager
def current_python(spark: SparkSession) -> Iterator[None]:
    """On ``local[n]``, make Spark run this interpreter, unless the user has set another one.

    By default Spark runs the first ``python3`` on PATH. If this virtual environment is not
    activated, that may be another interpreter.
    """
    context = spark_context(spark)
    user_chose = "PYSPARK_PYTHON" in os.environ or conf_of(spark, "spark.pyspark.python")
    if context is None or user_chose or not is_on_this_machine(spark):
        yield
        return
    with _python_exec_lock:
        before = context.pythonExec
        context.pythonExec = sys.executable
        try:
            yield
        finally:
            context.pythonExec = before


@contextmanager
def jobs_until(stopped: threading.Event, spark: SparkSession) -> Iterator[None]:
    """Cancel the Spark jobs that this thread starts in the block as soon as an event is set."""
    tag, over = f"horovod_runner-{secrets.token_hex(8)}", threading.Event()
    context = spark_context(spark)
    if context is None:
        add, remove, cancel = spark.addTag, spark.removeTag, spark.interruptTag
    else:
        add, remove, cancel = context.addJobTag, context.removeJobTag, context.cancelJobsWithTag

    def watch() -> None:
        while not over.wait(_AGAIN_SECONDS):
            if stopped.is_set():  # again and again: Spark may not know the job yet
                cancel(tag)

    add(tag)
    thread = start_thread("jobs", watch)
    try:
        yield
    finally:
        over.set()
        thread.join()
        remove(tag)
