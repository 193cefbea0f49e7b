"""Asks the engine under Spark (YARN, Kubernetes) about an application's executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from horovod_runner.common.spark_session import conf_of, spark_context
from horovod_runner.launchers import kubernetes_pods, yarn_queue

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# By the scheme of the master's URL.
_REASONS: Final[Mapping[str, Callable[[SparkSession], str]]] = {
    "yarn": yarn_queue.reason,
    "k8s": kubernetes_pods.reason,
}


def why_missing(spark: SparkSession) -> str:
    """Why executors that were asked for do not run; empty if the engine says nothing."""
    reason = _REASONS.get((conf_of(spark, "spark.master") or "").partition(":")[0])
    if reason is None or spark_context(spark) is None:
        return ""  # on Spark Connect another process has the engine's client
    with suppress(Exception):  # this only explains another error
        return reason(spark)
    return ""


def count_executors(spark: SparkSession) -> int | None:
    """How many executors run; None if Spark does not tell."""
    try:
        infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
        return len(infos) - 1  # the driver is one of them
    except Exception:
        return None
