"""A real Spark Connect server on this machine, from the pip package alone."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyspark

from tests.programs import await_in_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_SECONDS = 180.0
_STOP_SECONDS = 30.0
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


class ConnectServer:
    """The server as a child process, on a free port of 127.0.0.1; use it as a context.

    Args:
        folder: for its log and work files.
        master: the Spark master that it uses.
        conf: Spark settings.
        environment: variables beside those of this process.

    Attributes:
        url: for ``SparkSession.builder.remote``.
        port: the port that it listens on.
    """

    def __init__(
        self,
        folder: Path,
        master: str = "local[4]",
        conf: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._master = master
        self._conf = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.ui.enabled": "false",
            **(conf or {}),
        }
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.port = 0

    def __enter__(self) -> ConnectServer:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        home = Path(pyspark.__file__).parent
        command = [str(home / "bin" / "spark-class"), "org.apache.spark.deploy.SparkSubmit"]
        command += ["--class", _CLASS, "--master", self._master]
        for name, value in self._conf.items():
            command += ["--conf", f"{name}={value}"]
        log = self._folder / "connect-server.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "spark-internal"],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # A server elsewhere would not have the credentials of this process either.
                env={
                    **{key: text for key, text in os.environ.items() if not key.startswith("AWS_")},
                    "SPARK_HOME": str(home),
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    # The checkout under test.
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    **self._environment,
                },
                start_new_session=True,
            )
        started = r"Spark Connect server started at: \S+?:(\d+)"
        self.port = int(await_in_log(log, started, self._process, _START_SECONDS))
        self.url = f"sc://127.0.0.1:{self.port}"

    def session(self) -> SparkSession:
        """A session on this server."""
        from pyspark.sql import SparkSession

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # pyspark's, about the newest pandas
            return SparkSession.builder.remote(self.url).getOrCreate()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """Stop the server and all processes that it started. May be called twice."""
        if self._process is None:
            return
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        for child in children:  # Spark's Python daemon, in another process group
            with suppress(psutil.NoSuchProcess):
                child.kill()
