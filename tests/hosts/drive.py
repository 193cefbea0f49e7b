"""A driver on another host, which runs the functions that a test sends it.

:class:`Driver` is the test's end; the other end, ``python -m tests.hosts.drive DESCRIPTOR``, has
the Spark session. A pair of sockets connects them across the network namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.hosts.network import Host

# These hosts are one machine: MPI would use its shared memory instead of the network. The driver
# passes the variable on, the same for all runs: one fork server for each host serves them all.
_NO_SHARED_MEMORY = {"UCX_TLS": "tcp"}


class Driver:
    """A process with a Spark session; use it as a context.

    Args:
        host: where it runs.
        folder: for its log.
        conf: the session's settings.

    Other hosts do not see its temporary files.
    """

    def __init__(self, host: Host, folder: Path, conf: dict[str, str]) -> None:
        own = folder / "own"
        own.mkdir()
        host.hide(own)
        self._log = folder / "driver.log"
        self._connection, other_end = Pipe()
        descriptor = other_end.fileno()
        with other_end, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*host.enter, sys.executable, "-m", "tests.hosts.drive", str(descriptor)],
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
                env={**os.environ, **_NO_SHARED_MEMORY, "TMPDIR": str(own)},
            )
        self._connection.send(conf)

    def __enter__(self) -> Driver:
        self.result()  # of the session's start
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # the driver then exits by itself, and keeps its coverage
        try:
            self._process.wait(timeout=30)
        finally:
            self._process.kill()
            self._process.wait()

    def start(self, np: int | tuple[int, int], main: Callable[..., Any], **options: Any) -> None:
        """Start a run of ``main``, which must be a function of a module."""
        self._connection.send((np, main, options))

    def wait_for(self, text: str) -> None:
        """Wait until the run prints a text."""
        while text not in self._log.read_text():
            assert not self._connection.poll(0.1), self.result()  # a log file offers no event

    def result(self) -> tuple[Any, str]:
        """Wait for the end of the run: its value, and the text of its exception."""
        try:
            value, error = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the driver died:\n{self._log.read_text()[-3000:]}") from None
        return value, error

    def run(self, np: int, main: Callable[..., Any], **options: Any) -> Any:
        """Run ``main``, and return its value on rank 0."""
        self.start(np, main, **options)
        value, error = self.result()
        assert not error, error
        return value

    def error(self, np: int, main: Callable[..., Any], **options: Any) -> str:
        """Run ``main``, which must fail, and return the text of the error."""
        self.start(np, main, **options)
        value, error = self.result()
        assert error, f"the run returned {value!r}"
        return error


def _serve(connection: Connection) -> None:
    """Run the functions that arrive, until the other end closes."""
    from pyspark.sql import SparkSession

    from horovod_runner import HorovodRunner
    from horovod_runner.common.options import grouped

    spark = SparkSession.builder.config(map=connection.recv()).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    connection.send((None, ""))
    while True:
        np, main, options = connection.recv()
        options.setdefault("preload_frameworks", ["horovod.torch"])  # imported once on each host
        value, error = None, ""
        try:
            value = HorovodRunner(np=np, **grouped({"spark": spark, **options})).run(main)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}\n{raised.__cause__ or ''}"
        connection.send((value, error))


if __name__ == "__main__":
    with suppress(EOFError), Connection(int(sys.argv[1])) as own_end:
        _serve(own_end)
