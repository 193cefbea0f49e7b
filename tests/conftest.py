"""What all tests share: sessions, launchers, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from horovod_runner import HorovodRunner
from horovod_runner.checkpoints import checkpoint
from horovod_runner.common.options import grouped
from horovod_runner.host import software
from horovod_runner.host.processes import wait_for_end
from tests import suites
from tests.places import ENGINES, PLACES, SHARED, SPARKS, Sessions
from tests.preload import TORCH, preload_what_tests_import, without_what_imports_set
from tests.suites import NAME, UNKNOWN, in_quick, quick_tests

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Marks the processes of these tests among all that may run on this machine: another `make test`, or
# the other processes of pytest-xdist.
SESSION = "HOROVOD_RUNNER_TEST_SESSION"
_LONG = {"stories", "real", "test_packed.py"}
_BEFORE = dict(os.environ)
faulthandler.enable()
pytest.register_assert_rewrite("tests.notebooks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--places",
        default="local,spark",
        help=f"where the ranks of the tests may run, of {','.join(PLACES)}; or all of these, "
        f"or an engine, of {','.join(ENGINES)} (default: local,spark)",
    )
    parser.addoption(
        "--suite",
        choices=("quick", "all"),
        default="all",
        help="quick: the tests of `make test` alone, in all places; see tests/suites.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Not where this module is imported: ranks do that, too.
    import hypothesis

    # Nothing is timed in a test; and a test that fails must fail again.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("project")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each rank would compile all it imports
    os.environ["PYSPARK_PYTHON"] = sys.executable  # Spark starts its Python workers with it
    if "REAL_JAVA" not in os.environ:
        home = os.environ.get("JAVA_HOME")
        os.environ["REAL_JAVA"] = f"{home}/bin/java" if home else shutil.which("java") or "java"
        os.environ["JAVA_HOME"] = str(Path(__file__).parent / "java")
        os.environ["SPARK_CLASSES"] = f"{sys.prefix}/spark.jsa"
    os.environ[SESSION] = str(os.getpid())
    # A shell starts what runs in the background with SIGINT ignored, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Temporary files and the list of runs are in folders of this process alone. Their path is
    # short, for sockets lie in them, and others may look into it, as munge wants.
    folder = tempfile.mkdtemp(prefix="hr-", dir="/tmp")
    # By its name: where an earlier line of this function fails, tempfile's folder is all of /tmp.
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.chmod(folder, 0o755)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["XDG_STATE_HOME"] = f"{folder}/state"
    os.environ["MLFLOW_TRACKING_URI"] = f"file://{folder}/mlruns"  # MLflow's own is where we are
    preload_what_tests_import()
    suites.running = config.getoption("suite")
    places = (*PLACES, *ENGINES)
    unknown = set(_allowed(config)) - set(places)
    if unknown:
        raise pytest.UsageError(f"--places: {', '.join(unknown)} is none of {', '.join(places)}")


def pytest_unconfigure() -> None:
    gc.freeze()  # or the end of the interpreter would search for garbage


def _allowed(config: pytest.Config) -> list[str]:
    given = "all" if suites.running == "quick" else config.getoption("places")
    return list(PLACES) if given == "all" else given.split(",")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``ranks`` or ``spark`` runs once in each of its places."""
    if "place" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("places")
    places = marker.args if marker else ("local", "spark")
    if "ranks" not in metafunc.fixturenames:
        places = [place for place in places if place in SPARKS]
    metafunc.parametrize("place", places, indirect=True, scope="session")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep together what shares something large; pytest-xdist reads the groups right after this.

    The tests of a file on one Spark session use the same frameworks, which Spark's Python workers
    and the fork servers of ranks keep imported for a minute or more.
    """
    item.stash[NAME] = item.nodeid
    place = _place(item)
    if place in SHARED:
        item.add_marker(pytest.mark.xdist_group(place))
    elif place == "spark":
        quick = suites.running == "quick"  # with few tests from each file
        item.add_marker(pytest.mark.xdist_group("spark" if quick else f"spark {item.path.stem}"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs in other places, and begin with what takes longest.

    At the end of a session each process of pytest-xdist finishes the test that it has.
    """
    allowed = _allowed(config)
    chosen = [item for item in items if _place(item) in allowed]
    if suites.running == "quick":
        chosen = _quick(config, chosen)
    left_out = {*items} - {*chosen}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = chosen
    items.sort(key=lambda item: not _LONG & {*item.path.parts})


def _quick(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of `make test`."""
    listed = quick_tests()
    ids = [item.stash[NAME] for item in items]
    files = {each.partition("::")[0] for each in ids}
    named = {name for each in ids for name in (each, each.partition("[")[0])} | files
    config.stash[UNKNOWN] = [
        each for each in listed if each.partition("::")[0] in files and each not in named
    ]
    return [item for item in items if in_quick(item.stash[NAME], listed)]


def _place(item: Any) -> str:
    if "allocation" in item.fixturenames:
        return "slurm"
    if hasattr(item, "callspec") and "place" in item.callspec.params:
        return str(item.callspec.params["place"])
    marker = item.get_closest_marker("places")
    return str(marker.args[0]) if marker else "local"


@pytest.fixture(autouse=True)
def _variables_of_imports() -> Iterator[None]:
    """Drop the variables that imports have set in this process."""
    yield
    without_what_imports_set(_BEFORE)


@pytest.fixture(scope="session")
def sessions() -> Iterator[Sessions]:
    """The Spark sessions of this process."""
    opened = Sessions()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> str:
    """Where the ranks of a test run; see tests/places.py."""
    return str(request.param)


@pytest.fixture
def spark(place: str, sessions: Sessions) -> Iterator[SparkSession]:
    """A session with four slots."""
    with sessions.use(place) as session:
        yield session


class Ranks:
    """Starts runs in one of the places."""

    def __init__(
        self, place: str, spark: SparkSession | None = None, *, warm: Sequence[str] = ()
    ) -> None:
        self.place = place
        self.spark = spark
        self._warm = warm

    @property
    def url(self) -> str:
        """The Connect server's."""
        assert self.spark is not None
        return f"sc://{self.spark.client._builder.endpoint}"

    @property
    def master(self) -> str:
        assert self.spark is not None
        return str(self.spark.conf.get("spark.master"))

    @property
    def opening(self) -> str:
        """Code by which another process opens a session like this one; empty for local ranks."""
        if self.spark is None:
            return ""
        to = f"remote('{self.url}')" if self.place == "connect" else f"master('{self.master}')"
        return (
            "from pyspark.sql import SparkSession\n"
            f"builder = SparkSession.builder.{to}\n"
            "spark = builder.config('spark.ui.enabled', 'false').getOrCreate()\n"
        )

    @staticmethod
    def needs_mpi() -> None:
        """Horovod has the mpich package's MPI on one leg alone."""
        if "mpich" not in software.installed():
            pytest.skip("Horovod was built without the mpich package")

    @staticmethod
    def needs_tensorflow() -> None:
        """Horovod is built for torch alone on the second leg; without an import of TensorFlow."""
        horovod = Path(find_spec("horovod").origin or "").parent  # type: ignore[union-attr]
        if not list(horovod.glob("tensorflow/mpi_lib*.so")):
            pytest.skip("Horovod was built without TensorFlow")

    def runner(self, size: int | tuple[int, int], **options: Any) -> HorovodRunner:
        # Several ranks import less together if they are forked, also from a fork server that no
        # other run uses because its variables or threads differ. One rank would gain nothing.
        several = isinstance(size, tuple) or size > 1
        if self._warm:
            options.setdefault("preload_frameworks", self._warm if several else False)
        # The cluster's GPUs are simulated: only the tests about them may see them.
        if self.place == "cluster":
            options.setdefault("gpus_per_rank", 0)
        # A run that hangs ends with the stacks of its ranks, before the time-out of its test.
        options.setdefault("hang_timeout", 300)
        if self.place == "slurm":
            return HorovodRunner(np=size, **grouped({"launcher": "slurm", **options}))
        np = size
        if self.spark is None:  # processes of this machine
            np = (-size[0], -size[1]) if isinstance(size, tuple) else -size
        return HorovodRunner(np=np, **grouped({"spark": self.spark, **options}))

    def run(
        self, size: int, main: Any, options: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        return self.runner(size, **(options or {})).run(main, **kwargs)


@pytest.fixture(scope="session")
def _slurm() -> Iterator[dict[str, str]]:
    """The variables of a process in an allocation of four tasks."""
    from tests.hpc import require_slurm, slurm

    require_slurm()
    # Not pytest's folder: munge wants one that others can look into.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm.running(Path(folder)) as found,
    ):
        yield {**found, **slurm.allocate(found, 4)}


@pytest.fixture
def allocation(_slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in a Slurm allocation of four tasks."""
    for name, value in _slurm.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, place: str) -> Ranks:
    """Starts runs in one of the places."""
    if place == "slurm":
        request.getfixturevalue("allocation")
    spark = request.getfixturevalue("spark") if place in SPARKS else None
    markers = {marker.name: marker for marker in request.node.iter_markers()}
    warm: Sequence[str] = ()
    if place != "slurm" and "cold" not in markers:
        if "horovod" in markers:
            warm = TORCH
        elif "warm" in markers:
            warm = markers["warm"].args
    return Ranks(place, spark, warm=warm)


def own_processes(*modules: str) -> list[psutil.Process]:
    """The processes of these tests that run one of these modules and have not ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            # Not by psutil's process_iter, which took most of what pytest itself used of the CPU.
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if {*modules} & {*words}:  # a process that has ended has no words
                process = psutil.Process(pid)
                if process.environ().get(SESSION) == os.environ[SESSION]:
                    found.append(process)
    return found


def fork_servers() -> list[psutil.Process]:
    """Those of these tests, without the ranks that are forked off them."""
    return [
        each for each in own_processes("horovod_runner.task.warm.server") if not is_forked(each)
    ]


def is_forked(process: psutil.Process) -> bool:
    """Whether a fork server has forked it."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and runs(parent, "horovod_runner.task.warm.server")
    return False


def runs(process: psutil.Process, module: str) -> bool:
    """Whether a process, which may end at any moment, was started with a module."""
    with contextlib.suppress(psutil.Error):
        return module in process.cmdline()
    return False


def _workers() -> set[int]:
    """All processes of ranks. Fork servers outlast a run: that is what they are for."""
    found = own_processes("horovod_runner.worker.main", "horovod_runner.task.warm.server")
    return {
        process.pid
        for process in found
        if runs(process, "horovod_runner.worker.main") or is_forked(process)
    }


def guards_and_ranks() -> tuple[set[int], set[int]]:
    """The processes of ranks, in two: a guard has its rank as a child."""
    guards = set()
    workers = _workers()
    for pid in workers:
        with contextlib.suppress(psutil.Error):
            guards.add(psutil.Process(pid).ppid())
    return workers & guards, workers - guards


def await_end(pids: set[int]) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    wait_for_end(processes, 20)


def own_files() -> set[str]:
    """Named temporary files and folders, but for those of fork servers."""
    ours = [*Path(tempfile.gettempdir()).glob("horovod_runner-*")]
    shared = [path for path in ours if path.name == f"horovod_runner-{os.getuid()}"]
    names = {path.name for path in ours if path not in shared}
    for folder in shared:
        with contextlib.suppress(FileNotFoundError):
            inside = {path.name for path in folder.iterdir()}
            names |= {name for name in inside if not name.startswith("warm-")}
    return names


def _memory() -> set[str]:
    """MPICH's files of shared memory."""
    return {str(path) for path in Path("/dev/shm").glob("mpich_*")}


def _unused(memory: set[str]) -> set[str]:
    """Those that no process maps: nobody will remove them any more."""
    found = memory & _memory()
    for pid in psutil.pids():
        if not found:
            break
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/maps").read_text()
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
    connections = psutil.Process().net_connections("tcp")
    return len([c for c in connections if c.status == psutil.CONN_LISTEN])


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank sees the driver's folder of checkpoints, as without a shared file system."""
    monkeypatch.setattr(checkpoint, "write_probe", lambda folder, token: None)


@pytest.fixture
def mlflow(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow with a folder as its store, or with a "database", if that is the parameter."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    store = (tmp_path / "mlruns").as_uri()
    if getattr(request, "param", "folder") == "database":  # requires more than mlflow-skinny
        store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return pytest.importorskip("mlflow")


@pytest.fixture
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of runs, and their records, are of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def folder_of_models() -> None:
    """Files of models stay until the end of the process: a DataFrame may need them at any time."""
    from horovod_runner.data.scoring import model_file

    model_file._folder()


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No worker, thread, named file or descriptor more than before the test."""
    for name in {"ranks", "spark"} & {*request.fixturenames}:
        request.getfixturevalue(name)  # what Spark opens is not ours to close
    gc.collect()
    # What lives now is not looked at again: with all frameworks imported a collection takes 0.7 s.
    gc.freeze()
    before = _workers(), own_files(), _own_threads(), _descriptors(), _listening()
    memory = _memory()
    yield
    gc.collect()
    if "connect" in request.node.name:  # the server ends ranks only after its client has left
        await_end(_workers() - before[0])
    assert _workers() <= before[0]
    end = time.monotonic() + 20
    # An executor's task outlasts its run by a moment, and so does a thread that is asking Spark.
    while not (own_files() <= before[1] and _own_threads() <= before[2]) and time.monotonic() < end:
        time.sleep(0.1)
    assert own_files() <= before[1]
    assert _own_threads() <= before[2]
    assert _descriptors() - before[3] == Counter()
    assert _listening() <= before[4]
    # Runs beside this one make and remove such files at any moment: only those that stay count.
    end = time.monotonic() + 20
    left = _unused(_memory() - memory)
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left = _unused(left)
    assert not left
