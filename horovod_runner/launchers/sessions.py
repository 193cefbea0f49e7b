"""Finds or opens a Spark session."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from horovod_runner.errors import LaunchError
from horovod_runner.launchers import spark_host

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def find_session() -> SparkSession:
    """The active session, or a new one with the settings of ``spark-submit`` or the defaults.

    Raises:
        LaunchError: pyspark is not installed, or this host is likely to keep Spark from starting.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise LaunchError(
            "np above 0 runs on Spark, and pyspark is not installed: "
            "pip install horovod_runner[spark], or use np=-N for N ranks on this machine."
        ) from error
    with suppress(Exception):  # there is none; the exception's class depends on the version
        return SparkSession.active()
    try:
        return SparkSession.builder.getOrCreate()
    except Exception as error:
        causes = spark_host.likely_causes()
        if not causes:
            raise
        raise LaunchError(f"Spark did not start: {_first(error)}. {' '.join(causes)}") from error


def open_session(master: str, name: str, conf: Sequence[tuple[str, str]] = ()) -> SparkSession:
    """Open a session on a master, or on a Connect server (``sc://``), with some settings.

    Raises:
        LaunchError: pyspark is not installed, or the session cannot be opened.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise LaunchError("pyspark is not installed: pip install horovod_runner[spark]") from error
    builder = SparkSession.builder.appName(name)
    for key, value in conf:
        builder = builder.config(key, value)
    is_connect = master.startswith("sc://")
    try:
        builder = builder.remote(master) if is_connect else builder.master(master)
        return builder.getOrCreate()
    except Exception as error:
        causes = [] if is_connect else spark_host.likely_causes()
        remedy = " ".join(causes) or "Check the master's URL."
        raise LaunchError(
            f"no Spark session could be opened on {master}: {_first(error)}. {remedy}"
        ) from error


def _first(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
