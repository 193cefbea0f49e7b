"""Where the ranks of a test run, and what is started for it.

| place     | what it is                                                        |
|-----------|-------------------------------------------------------------------|
| `local`   | processes of this machine, without Spark                          |
| `spark`   | a Spark session of this process with four slots, `local[4]`       |
| `cluster` | a standalone cluster: two executors with two slots each           |
| `connect` | a Spark Connect server with four slots                            |
| `slurm`   | an allocation of four tasks in a Slurm of this machine            |
| `hosts`   | network namespaces with a Spark cluster or a Slurm over them      |

A test says where it runs by ``@pytest.mark.places("local", "cluster")``; without that it runs in
`local` and `spark`. ``pytest --places`` says which of them a session of tests may use.

Engines are places too, with a target of the Makefile each: `docker`, `kubernetes`, `tables` and
`yarn`. They belong to no other session of tests.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACES = ("local", "spark", "cluster", "connect", "slurm", "hosts")
#: Engines, which are started for real; see tests/engines.
ENGINES = ("docker", "kubernetes", "tables", "yarn")
#: For what every launcher has to do, wherever its ranks run.
EVERYWHERE = ("local", "spark", "cluster", "connect", "slurm")
#: Those with a Spark session in the tests' process.
SPARKS = ("spark", "cluster", "connect")
#: Those that pytest-xdist gives to one of its processes: what they start is large.
SHARED = ("cluster", "connect", "slurm", "hosts")
#: The settings of sessions that many tests share: a daemon of Python workers for tests.
DAEMON = {
    "spark.python.daemon.module": "tests.spark_daemon",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[1]),
}
_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"


class Sessions:
    """The Spark sessions of this process: one at a time, because PySpark allows no more.

    Asking for another place's session ends the one before, with its cluster or server.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._place = ""
        self._session: SparkSession | None = None

    def get(self, place: str) -> SparkSession:
        """The session of `spark`, `cluster` or `connect`."""
        if self._session is None or place != self._place:
            self.close()
            self._session = getattr(self, f"_start_{place}")()
            self._place = place
        return self._session

    @contextmanager
    def use(self, place: str) -> Iterator[SparkSession]:
        """The session of a place for one test.

        PySpark leaves a variable behind that says that this process uses Spark Connect. What the
        tests of other places start would inherit it, and find no Connect server.
        """
        session = self.get(place)
        if place == "connect":
            os.environ[_CONNECT_MODE] = "1"
        try:
            yield session
        finally:
            os.environ.pop(_CONNECT_MODE, None)

    def close(self) -> None:
        """End the session and what was started for it."""
        self._session = None
        self._open.close()

    def _folder(self) -> Path:
        return Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="spark-")))

    def _start_spark(self) -> SparkSession:
        return self._classic("local[4]", DAEMON)

    def _start_cluster(self) -> SparkSession:
        from tests.cluster.standalone import CONF, StandaloneCluster

        cluster = self._open.enter_context(StandaloneCluster(self._folder()))
        session = self._classic(cluster.master, {**CONF, **DAEMON})
        cluster.await_executors(session)
        return session

    def _start_connect(self) -> SparkSession:
        from tests.connect.server import ConnectServer

        server = self._open.enter_context(ConnectServer(self._folder(), conf=DAEMON))
        session = server.session()
        self._open.callback(session.stop)
        return session

    def _classic(self, master: str, conf: Mapping[str, str]) -> SparkSession:
        return self._open.enter_context(classic_session({"spark.master": master, **conf}))


@contextmanager
def classic_session(conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session of this process, which ends with its Java process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()
        _end_java()


def _end_java() -> None:
    """End PySpark's Java process: it would give its settings to the next session, too."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
