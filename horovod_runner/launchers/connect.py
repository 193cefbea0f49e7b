"""Spark Connect: what stands in there for the SparkContext, which stays with the server.

    driver (this process) --gRPC--> Connect server (runs Spark) --> executors
       ^-------------------- the ranks' messages -------------------'

The job and its outcomes go through the server; the channel goes past it.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from horovod_runner import host
from horovod_runner.session import conf_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER_HOST = "HOROVOD_RUNNER_DRIVER_HOST"
_KNOCK_SECONDS = 2.0
_KNOCKS = 3  # a server that is being restarted refuses as well: the first refusal says little


def server_endpoint(spark: SparkSession) -> tuple[str, int] | None:
    """The Connect server's host and port; None where they cannot be told."""
    try:
        name, _, port = spark.client._builder.endpoint.rpartition(":")
        return name.strip("[]"), int(port)
    except Exception:
        return None  # a channel builder of the user's own


def driver_host(spark: SparkSession, spark_driver_host: str) -> str:
    """How executors reach this process.

    By the variable HOROVOD_RUNNER_DRIVER_HOST, else by the address that this host has towards the
    server. A server on this very host knows better: by its own ``spark.driver.host``.
    """
    named = os.environ.get(DRIVER_HOST)
    if named:
        return named
    endpoint = server_endpoint(spark)
    own = "127.0.0.1"
    with suppress(OSError):
        own = host.address_towards(endpoint[0]) if endpoint else own
    if own.startswith("127.") and host.is_own(spark_driver_host):
        return spark_driver_host
    return own


def count_slots(spark: SparkSession) -> int | None:
    """How many tasks the cluster runs at a time, at most; None where it cannot be told.

    No public call counts slots. But a range is cut into as many parts as there are cores, unless a
    setting says otherwise, and the plan tells how many. Nothing runs for it.
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
    """How many tasks fit on so many cores of executors, at most."""
    local = (conf("spark.master") or "").startswith("local[")
    each = cores if local else int(conf("spark.executor.cores") or cores)
    tasks = each // int(conf("spark.task.cpus") or 1)
    gpus = float(conf("spark.executor.resource.gpu.amount") or 0)
    wanted = float(conf("spark.task.resource.gpu.amount") or 0)
    if gpus and wanted and each < cores:  # else there is no telling how many executors there are
        tasks = min(tasks, int(gpus / wanted))
    return cores // each * tasks


class Lookout:
    """Notices when the Connect server has ended: its port refuses connections.

    Spark's client keeps trying for ten minutes. A server behind a proxy, or one that only cannot be
    reached for a while, is left to it.

    Args:
        endpoint: the server's host and port.
        done: set when nobody wants to know any more.
        gone: called once, from a thread, with what to say.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        done: threading.Event,
        gone: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._done = done
        self._gone = gone
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        refusals = 0
        if self._refuses():
            return  # reached by some other way, a proxy say
        while refusals < _KNOCKS:
            if self._done.wait(_KNOCK_SECONDS):
                return
            refusals = refusals + 1 if self._refuses() else 0
        self._gone(
            "the Spark Connect server at {}:{} has ended in the middle of the run: its port "
            "refuses connections. With it went the executors and the ranks; its log says "
            "why.".format(*self._endpoint)
        )

    def _refuses(self) -> bool:
        try:
            socket.create_connection(self._endpoint, timeout=_KNOCK_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


class TaskProgress:
    """When Spark started the tasks of a job, as it reports to Connect clients from 4.0 on.

    Attributes:
        told: whether Spark tells at all.
        started: by the monotonic clock; None before.
    """

    def __init__(self, spark: Any, size: int, wake: Callable[[], None]) -> None:
        self.told = hasattr(spark, "registerProgressHandler")
        self.started: float | None = None
        self._spark = spark
        self._size = size
        self._wake = wake

    def __enter__(self) -> TaskProgress:
        """Observe the job that the calling thread runs inside this context."""
        self._thread = threading.get_ident()
        if self.told:
            self._spark.registerProgressHandler(self._on_progress)
        return self

    def __exit__(self, *_: object) -> None:
        if self.told:
            self._spark.removeProgressHandler(self._on_progress)

    def _on_progress(self, *, inflight_tasks: int, **_: Any) -> None:
        # The session's handlers hear of all its jobs, each in the thread that waits for it.
        here = threading.get_ident() == self._thread
        if here and self.started is None and inflight_tasks >= self._size:
            self.started = time.monotonic()
            self._wake()
