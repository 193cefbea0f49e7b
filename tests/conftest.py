"""What all tests share: sessions, launchers, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest

from horovod_runner import HorovodRunner, software

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark starts its Python workers with what it finds here.
os.environ["PYSPARK_PYTHON"] = sys.executable
# Marks the processes of these tests among all that may run on this machine: another `make test`, or
# the other processes of pytest-xdist.
SESSION = "HOROVOD_RUNNER_TEST_SESSION"
os.environ[SESSION] = str(os.getpid())
# For the same reason temporary files and the list of runs are in folders of this process's own.
# Their path is short, for sockets lie in them, and others may look into it, as munge wants.
_FOLDER = tempfile.mkdtemp(prefix="hr-", dir="/tmp")
os.chmod(_FOLDER, 0o755)
os.environ["TMPDIR"] = tempfile.tempdir = _FOLDER
os.environ["XDG_STATE_HOME"] = f"{_FOLDER}/state"
faulthandler.enable()
# Nothing is timed in a test; and a test that fails must fail again.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")


def pytest_sessionfinish(exitstatus: int) -> None:
    """Remove this process's folder, unless something in it may tell why a test failed."""
    if exitstatus == 0:
        shutil.rmtree(_FOLDER, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        action="store_true",
        help="run the Spark tests on a standalone cluster with two executors",
    )
    parser.addoption(
        "--hosts", action="store_true", help="run the tests over several hosts; takes root"
    )
    parser.addoption(
        "--connect",
        action="store_true",
        help="run the Spark tests through a Spark Connect server",
    )
    parser.addoption(
        "--slurm",
        action="store_true",
        help="run the tests of the launchers in an allocation of a Slurm; takes root",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test with ``ranks`` runs once on either launcher, or on Slurm's."""
    if "ranks" in metafunc.fixturenames:
        on_slurm = metafunc.config.getoption("--slurm")
        launchers = ["slurm"] if on_slurm else ["local", "spark"]
        metafunc.parametrize("ranks", launchers, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """On a cluster and over Connect, contracts that use neither would only be tested again."""
    if not any(config.getoption(option) for option in ("--cluster", "--connect", "--slurm")):
        return
    for item in items:
        elsewhere = {"ranks", "spark"}.isdisjoint(item.fixturenames)
        if elsewhere and Path(item.path).parent.name == "contract":
            item.add_marker(pytest.mark.skip(reason="has nothing to do with where executors are"))


@pytest.fixture(scope="session")
def spark(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """A session with four slots: ``local[4]``, or two executors of two slots each."""
    with contextlib.ExitStack() as stack:
        master, conf = "local[4]", {}
        if request.config.getoption("--cluster"):
            from tests.cluster.standalone import CONF, StandaloneCluster

            folder = tmp_path_factory.mktemp("cluster")
            master, conf = stack.enter_context(StandaloneCluster(folder)).master, CONF
        if request.config.getoption("--connect"):
            from tests.connect.server import ConnectServer

            folder = tmp_path_factory.mktemp("connect")
            session = stack.enter_context(ConnectServer(folder, master, conf)).session()
        else:
            session = _classic_session(master, conf)
        yield session
        session.stop()


def _classic_session(master: str, conf: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


class Ranks:
    """Starts runs through one of the launchers."""

    def __init__(self, launcher: str, spark: SparkSession | None) -> None:
        self.launcher = launcher
        self.spark = spark

    @property
    def on_cluster(self) -> bool:
        return self.spark is not None and not self.master.startswith("local")

    @property
    def on_connect(self) -> bool:
        return self.spark is not None and type(self.spark).__module__.startswith(
            "pyspark.sql.connect"
        )

    @property
    def url(self) -> str:
        """The Connect server's."""
        assert self.spark is not None
        return f"sc://{self.spark.client._builder.endpoint}"

    @property
    def master(self) -> str:
        assert self.spark is not None
        return str(self.spark.conf.get("spark.master"))

    def skip_where_it_is_slow(self) -> None:
        """For what local ranks and ``local[4]`` show as well as a cluster would."""
        if self.on_cluster or self.on_connect:
            pytest.skip("long, and has nothing to do with where executors are")

    @staticmethod
    def needs_mpi() -> None:
        """Horovod has the mpich package's MPI on one leg alone."""
        if "mpich" not in software.installed():
            pytest.skip("Horovod was built without the mpich package")

    def runner(self, size: int, **options: Any) -> HorovodRunner:
        # The cluster's GPUs are simulated: only the tests about them may see them.
        if self.on_cluster:
            options.setdefault("gpus_per_rank", 0)
        if self.launcher == "slurm":
            return HorovodRunner(np=size, launcher="slurm", **options)
        np = -size if self.spark is None else size
        return HorovodRunner(np=np, spark=self.spark, **options)

    def run(
        self, size: int, main: Any, options: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        return self.runner(size, **(options or {})).run(main, **kwargs)


@pytest.fixture(scope="session")
def allocation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """This process is in a Slurm allocation of four tasks."""
    from tests.hpc import require_slurm, slurm

    require_slurm()
    # Not pytest's folder: munge wants one that others can look into.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm.running(Path(folder)) as found,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**found, **slurm.allocate(found, 4)}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Starts runs; see pytest_generate_tests."""
    if request.param == "slurm":
        request.getfixturevalue("allocation")
        return Ranks("slurm", None)
    if request.param == "local":
        if request.config.getoption("--cluster") or request.config.getoption("--connect"):
            pytest.skip("the local launcher needs no Spark")
        return Ranks("local", None)
    return Ranks("spark", request.getfixturevalue("spark"))


def own_processes(*modules: str) -> list[psutil.Process]:
    """The processes of these tests that run one of these modules and have not ended."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        ended = process.info["status"] == psutil.STATUS_ZOMBIE
        if not ended and {*modules} & {*(process.info["cmdline"] or [])}:
            with contextlib.suppress(psutil.Error):
                if process.environ().get(SESSION) == os.environ[SESSION]:
                    found.append(process)
    return found


def _workers() -> set[int]:
    found = own_processes("horovod_runner.worker", "horovod_runner.forkserver")
    return {process.pid for process in found}


def _own_files() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("horovod_runner-*")}


def _unused_memory() -> set[str]:
    """MPICH's files of shared memory that no process maps: nobody will remove them any more."""
    found = {str(path) for path in Path("/dev/shm").glob("mpich_*")}
    for process in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):
            text = process.read_text()
            found = {name for name in found if name not in text}
    return found


def _own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "horovod_runner" in thread.name}


def _descriptors() -> Counter[str]:
    """Open files, pipes and the like; sockets apart, for Py4J keeps some of its own."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(re.sub(r"\[\d+\]$", "", os.readlink(f"/proc/self/fd/{name}")))
    return Counter(link for link in links if not link.startswith("socket:"))


def _listening() -> int:
    connections = psutil.Process().net_connections("inet")
    return len([c for c in connections if c.status == psutil.CONN_LISTEN])


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No worker, thread, named file or descriptor more than before the test."""
    if "ranks" in request.fixturenames:
        request.getfixturevalue("ranks")  # what Spark opens is not ours to close
    gc.collect()
    before = _workers(), _own_files(), _own_threads(), _descriptors(), _listening()
    memory = _unused_memory()
    yield
    gc.collect()
    assert _workers() <= before[0]
    assert _own_files() <= before[1]
    assert _own_threads() <= before[2]
    assert _descriptors() - before[3] == Counter()
    assert _listening() <= before[4]
    # Runs beside this one make and remove such files at any moment: only those that stay count.
    end = time.monotonic() + 20
    left = _unused_memory() - memory
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left &= _unused_memory()
    assert not left
