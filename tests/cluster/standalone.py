"""A real standalone Spark cluster on this machine, from the pip package alone.

By default it has two workers, each with two cores and two simulated GPUs. A discovery script names
the GPUs' addresses, so Spark's resource scheduling is real, and only the devices are not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyspark

from tests.programs import await_in_log, script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_SECONDS = 180.0
# Settings of an application: two executors with two slots each, and a GPU for each slot.
CONF = {
    "spark.executor.cores": "2",
    "spark.executor.memory": "1g",
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "1",
}


@dataclass(frozen=True)
class Place:
    """Where a daemon runs.

    Attributes:
        address: the address that it listens on.
        enter: a command line in front of its own; runs it on another host.
        gpus: the addresses of a worker's GPUs.
        cores: a worker's cores, with half a gigabyte of memory each.
    """

    address: str = "127.0.0.1"
    enter: Sequence[str] = ()
    gpus: Sequence[str] = ()
    cores: int = 2


def executor() -> psutil.Process:
    """The executor of the rank that calls this, in ``main``.

    It need not be an ancestor: a rank that starts warm is forked by what an earlier task started.
    """
    mark = "SPARK_LOG_URL_STDOUT"  # names the executor, in all processes that come from it
    own = os.environ[mark]
    javas = (each for each in psutil.process_iter(["name"]) if each.info["name"] == "java")
    return next(each for each in javas if each.environ().get(mark) == own)


class StandaloneCluster:
    """A master and workers as child processes; use it as a context.

    Args:
        folder: for logs and work files.
        workers: where they run.
        master: where the master runs.
    """

    def __init__(
        self,
        folder: Path,
        workers: Sequence[Place] = (Place(gpus=("0", "1")), Place(gpus=("2", "3"))),
        master: Place = Place(),
    ):
        self._folder = folder
        self._workers = workers
        self._master = master
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master = ""

    def __enter__(self) -> StandaloneCluster:
        try:
            self.master = self._start_master()
            for number, place in enumerate(self._workers):
                self._start_worker(number, place)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def await_executors(self, session: SparkSession) -> None:
        """Wait until each worker has its executor: a test may count the slots at once."""
        context = session.sparkContext._jsc.sc()
        deadline = time.monotonic() + _START_SECONDS
        # The driver is in this map, too.
        while (there := context.getExecutorMemoryStatus().size() - 1) < len(self._workers):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{there} of {len(self._workers)} executors have come")
            time.sleep(0.1)  # Spark offers no event for new executors

    def close(self) -> None:
        for process in reversed(self._processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _start_master(self) -> str:
        arguments = ["org.apache.spark.deploy.master.Master", "--host", self._master.address]
        arguments += ["--port", "0", "--webui-port", "0"]
        log = self._start("master", self._master, arguments)
        return self._await(log, r"Starting Spark master at (spark://\S+)")

    def _start_worker(self, number: int, place: Place) -> None:
        arguments = ["org.apache.spark.deploy.worker.Worker", "--host", place.address]
        arguments += ["--cores", str(place.cores), "--memory", f"{place.cores * 512}m"]
        arguments += ["--webui-port", "0"]
        arguments += ["--work-dir", str(self._folder / f"work-{number}")]
        if place.gpus:
            arguments += ["--properties-file", str(self._simulate_gpus(number, place.gpus))]
        log = self._start(f"worker-{number}", place, [*arguments, self.master])
        self._await(log, r"(Successfully registered with master)")

    def _simulate_gpus(self, number: int, addresses: Sequence[str]) -> Path:
        found = json.dumps({"name": "gpu", "addresses": list(addresses)})
        program = script(self._folder / f"gpus-{number}.sh", f"echo '{found}'")
        properties = self._folder / f"worker-{number}.conf"
        properties.write_text(
            f"spark.worker.resource.gpu.amount {len(addresses)}\n"
            f"spark.worker.resource.gpu.discoveryScript {program}\n"
        )
        return properties

    def _start(self, name: str, place: Place, arguments: list[str]) -> Path:
        log = self._folder / f"{name}.log"
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": place.address,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*place.enter, str(home / "bin" / "spark-class"), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def _await(self, log: Path, pattern: str) -> str:
        return await_in_log(log, pattern, self._processes[-1], _START_SECONDS)
