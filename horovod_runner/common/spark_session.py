"""Reads settings of a Spark session, and chooses the Python that its tasks run."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_AGAIN_SECONDS = 0.2
_python_exec_lock = threading.Lock()  # a CrossValidator scores in several threads at once


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


def map_in_arrow(
    dataframe: DataFrame, function: Callable[[Any], Any], schema: str, **options: Any
) -> DataFrame:
    """Call ``dataframe.mapInArrow(...)`` so that its tasks run this Python on ``local[n]``.

    PySpark 4 warns about pandas 3 at every call, although Arrow batches involve no pandas.
    """
    with current_python(dataframe.sparkSession), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        return dataframe.mapInArrow(function, schema, **options)


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

    thread = threading.Thread(target=watch, name="horovod_runner-jobs", daemon=True)
    add(tag)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        remove(tag)
