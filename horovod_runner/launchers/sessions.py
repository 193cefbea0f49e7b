"""Finds or opens a Spark session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from horovod_runner.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def find_session() -> SparkSession:
    """The active session, or a new one with the settings of ``spark-submit`` or the defaults.

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
    except Exception:  # there is none; the exception's class depends on the version
        return SparkSession.builder.getOrCreate()


def open_session(master: str, name: str, conf: Sequence[tuple[str, str]] = ()) -> SparkSession:
    """Open a session on a master, or on a Connect server (``sc://``).

    Args:
        master: the URL.
        name: the application's name.
        conf: Spark settings, as names and values.

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
    try:
        is_connect = master.startswith("sc://")
        builder = builder.remote(master) if is_connect else builder.master(master)
        return builder.getOrCreate()
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(
            f"no Spark session could be opened on {master}: {first}. Check the master's URL."
        ) from error
