"""Spark Connect: finds out what a SparkContext would know, which stays with the server.

    driver (this process) --gRPC--> Connect server (runs Spark) --> executors
       ^-------------------- the ranks' messages -------------------'

The job and its outcomes go through the server; the message channel does not.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from horovod_runner.common.slots import ranks_per_gpu
from horovod_runner.common.spark_session import conf_of, spark_context
from horovod_runner.common.threads import start_thread
from horovod_runner.host import network

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER_HOST = "HOROVOD_RUNNER_DRIVER_HOST"
_PROBES = 3  # a server that restarts refuses connections too: a single refusal says little


def server_endpoint(spark: SparkSession) -> tuple[str, int] | None:
    """The Connect server's host and port; None if they are not known."""
    try:
        name, _, port = spark.client._builder.endpoint.rpartition(":")
        return name.strip("[]"), int(port)
    except Exception:
        return None  # the user's own channel builder


def driver_host(spark: SparkSession, spark_driver_host: str) -> str:
    """The address by which executors reach this process.

    The variable HOROVOD_RUNNER_DRIVER_HOST if it is set. On a classic session otherwise
    ``spark.driver.host``. On Spark Connect that of the server if it runs on this host, otherwise
    this host's address towards the server.
    """
    named = os.environ.get(DRIVER_HOST)
    if named:
        return named
    if spark_context(spark) is not None:
        return spark_driver_host
    endpoint = server_endpoint(spark)
    address = "127.0.0.1"
    with suppress(OSError):
        address = network.address_towards(endpoint[0]) if endpoint else address
    if address.startswith("127.") and network.is_local(spark_driver_host):
        return spark_driver_host
    return address


def count_slots(spark: SparkSession) -> int | None:
    """How many tasks the cluster runs at a time, at most; None if that is not known.

    No public function counts slots. But Spark splits a range into as many partitions as there are
    cores, unless a setting says otherwise, and the query plan names the number. No job runs.
    """
    conf = partial(conf_of, spark)
    if conf("spark.default.parallelism") or conf("spark.sql.leafNodeDefaultParallelism"):
        return None
    try:
        plan = str(spark.sql("EXPLAIN SELECT * FROM range(1)").collect()[0][0])
    except Exception:
        return None
    splits = re.search(r"splits=(\d+)", plan)
    return slots_of(int(splits.group(1)), conf) if splits else None


def slots_of(cores: int, conf: Callable[[str], str | None]) -> int:
    """How many tasks fit on the executors, of which so many cores have registered, at most."""
    local = (conf("spark.master") or "").startswith("local[")
    executor_cores = cores if local else int(conf("spark.executor.cores") or cores)
    tasks = executor_cores // int(conf("spark.task.cpus") or 1)
    gpus = float(conf("spark.executor.resource.gpu.amount") or 0)
    gpus_per_task = float(conf("spark.task.resource.gpu.amount") or 0)
    # With all cores on one executor, the number of executors and their GPUs is not known.
    if gpus and gpus_per_task and executor_cores < cores:
        tasks = min(tasks, int(gpus * ranks_per_gpu(gpus_per_task) / math.ceil(gpus_per_task)))
    return cores // executor_cores * tasks


def sandboxed_compute() -> str | None:
    """The kind of Databricks' compute this driver is on, if Python functions run in sandboxes.

    "serverless compute" or "standard access mode"; None elsewhere. Both have Spark Connect only.
    By the variables that MLflow goes by (3.14, utils/databricks_utils.py).
    """
    version = os.environ.get("DATABRICKS_RUNTIME_VERSION")
    if "DATABRICKS_ENV_VERSION" in os.environ or (version or "").startswith("client."):
        return "serverless compute"
    return "standard access mode" if version else None


def watch_server(
    endpoint: tuple[str, int],
    done: threading.Event,
    on_end: Callable[[str], None],
    patience: float,
) -> None:
    """Notice in a thread that the Connect server has ended: its port refuses connections.

    Spark's client retries for ten minutes. Only a server whose port was open is watched: one behind
    a proxy, or one that cannot be reached for a while, is left to Spark's client.

    Args:
        endpoint: host and port.
        done: ends the watch.
        on_end: called once, from the thread, with a text for the user.
        patience: for so many seconds the port may refuse connections.
    """
    host, port = endpoint
    pause = patience / _PROBES

    def refuses() -> bool:
        try:
            socket.create_connection(endpoint, timeout=pause).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def watch() -> None:
        refusals = 0
        if refuses():
            return  # it is reached in another way, for instance through a proxy
        while refusals < _PROBES:
            if done.wait(pause):
                return
            refusals = refusals + 1 if refuses() else 0
        on_end(
            f"the Spark Connect server at {host}:{port} has ended in the middle of the run: its "
            "port refuses connections. The executors and the ranks ended with it. Look for the "
            "reason in the server's log."
        )

    start_thread("server", watch)
