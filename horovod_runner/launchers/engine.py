"""What the engine under Spark (YARN, Kubernetes) says about an application's executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from horovod_runner.launchers.kubernetes_pods import waiting_pods
from horovod_runner.launchers.yarn_queue import waiting_containers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# One function per engine: why executors that were asked for do not run. It returns "" on others.
_REASONS: Final[tuple[Callable[[SparkSession], str], ...]] = (waiting_containers, waiting_pods)


def why_missing(spark: SparkSession) -> str:
    """Why executors that were asked for do not run; empty if the engine says nothing."""
    return " ".join(filter(None, (reason(spark) for reason in _REASONS)))


def count_executors(spark: SparkSession) -> int | None:
    """How many executors run; None if Spark does not tell."""
    try:
        infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
        return len(infos) - 1  # the driver is one of them
    except Exception:
        return None
