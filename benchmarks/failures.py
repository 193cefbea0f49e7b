"""What the user is told when a rank fails, how soon, and what is left behind.

Each way to fail, under this package on this machine and on Spark, under PySpark's TorchDistributor
and under horovod.spark.run. Every case has a driver process of its own, so that a system that hangs
can be ended. Rank 0 is in the middle of a loop of allreduces when rank 1 fails, and each rank has
started a child process, as DataLoaders do.

    python benchmarks/failures.py [--causes raise kill] [--systems ours] [--limit 60]
    python benchmarks/failures.py --systems "ours, np=-2" "ours, np=2" --page docs/failures.md
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[1]
_SIZE = 2
_SHOWN_LINES = 15
_HANG_TIMEOUT = 6.0  # ours alone has such a setting


class Cause(NamedTuple):
    """One way to fail.

    Attributes:
        title: for the table.
        fail: what rank 1 does in the middle of its training; None: see ``run``.
        named: a pattern that the error matches when it says what happened.
        collectives: whether the ranks reduce; without, they only wait.
        cluster: needs executors of their own.
    """

    title: str
    fail: Callable[[], Any] | None
    named: str
    collectives: bool = True
    cluster: bool = False


def _raise() -> None:
    raise ValueError("learning rate is negative")


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)


def _fill_the_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("checkpoint")


def _out_of_memory() -> None:
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    group = root / ("memory" if old else "") / f"horovod_runner-failures-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(300 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard = [b"x" * (1 << 20) for _ in range(4000)]
    raise AssertionError(len(hoard))


def _kill_executor() -> None:
    executor = next(one for one in psutil.Process().parents() if one.name() == "java")
    executor.kill()
    threading.Event().wait()


def _hang_in_native_code() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # for years, with the interpreter's lock held


def _hang_in_a_lock() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def _hang_in_python() -> None:
    while True:
        pass


def _import_what_is_missing() -> None:
    import not_installed_here  # type: ignore[import-not-found]  # noqa: F401


def _close_output() -> None:
    os.write(1, b"caf\xe9\n")
    os.close(1)
    os.close(2)
    raise ValueError("learning rate is negative")


CAUSES = {
    "raise": Cause("main raises", _raise, r"ValueError: learning rate is negative"),
    "missing": Cause(
        "a module is missing", _import_what_is_missing, r"No module named 'not_installed_here'"
    ),
    "exit": Cause("sys.exit(3)", lambda: sys.exit(3), r"(?i)exit ?code:? *(\(.*\))? *3\b"),
    "vanish": Cause("os._exit(7)", lambda: os._exit(7), r"(?i)exit ?code:? *(\(.*\))? *7\b"),
    "kill": Cause("SIGKILL", lambda: _kill(signal.SIGKILL), r"SIGKILL|Signal 9\b"),
    "segv": Cause("SIGSEGV", lambda: _kill(signal.SIGSEGV), r"SIGSEGV|Signal 11\b"),
    "abort": Cause("abort()", os.abort, r"SIGABRT|Signal 6\b"),
    "oom": Cause("out-of-memory killer", _out_of_memory, r"SIGKILL|Signal 9\b|memory"),
    "disk": Cause("a full disk", _fill_the_disk, r"No space left on device"),
    "output": Cause(
        "raises after closing its output", _close_output, r"ValueError: learning rate is negative"
    ),
    "result": Cause("the result cannot be pickled", None, r"main returned a value|lock"),
    "pickle": Cause("main cannot be pickled", None, r"lock"),
    "slots": Cause("more ranks than slots", None, r"np=64|slots"),
    "early": Cause("a rank returns early", None, r"rank 1 returned|rank 1 .*finished"),
    "different": Cause("different collectives", None, r"rank 1 waits|Missing ranks"),
    "python": Cause("hangs in Python", _hang_in_python, r"_hang_in_python"),
    "native": Cause("hangs in native code", _hang_in_native_code, r"_hang_in_native_code"),
    "lock": Cause("hangs in a lock", _hang_in_a_lock, r"_hang_in_a_lock"),
    "freeze": Cause("SIGSTOP", lambda: _kill(signal.SIGSTOP), r"SIGSTOP|stopped"),
    "executor": Cause(
        "its executor is killed", _kill_executor, r"ExecutorLostFailure|was lost", cluster=True
    ),
}


class Collectives:
    """The two calls that the training loop makes, under either library."""

    def __init__(self, system: str) -> None:
        import torch

        self._tensor = torch.ones(1000)
        if system == "TorchDistributor":
            import torch.distributed

            torch.distributed.init_process_group("gloo")
            self.rank = torch.distributed.get_rank()
            self._reduce = torch.distributed.all_reduce
            self._other = lambda tensor: torch.distributed.broadcast(tensor, src=1)
        else:
            import horovod.torch as hvd

            hvd.init()
            self.rank = hvd.rank()
            self._reduce = lambda tensor: hvd.allreduce(tensor, name="gradient")
            self._other = lambda tensor: hvd.allreduce(tensor, name="loss")

    def reduce(self) -> None:
        """What all ranks do in each step."""
        self._reduce(self._tensor)

    def call_another(self) -> None:
        """What no other rank does."""
        self._other(self._tensor)


def train(folder: str, system: str, name: str) -> Any:
    """The ranks' ``main``."""
    note = Path(folder)
    # With no part in this one's output: TorchDistributor waits for the end of that.
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (note / f"pid-{os.getpid()}").touch()
    (note / f"pid-{child.pid}").touch()
    collectives = Collectives(system)
    for _ in range(10):
        collectives.reduce()
    if name == "result":
        (note / "fact").touch()
        return threading.Lock()
    if collectives.rank == 1:
        (note / "fact").touch()
        if name == "early":
            return None
        if name == "different":
            collectives.call_another()
        fail = CAUSES[name].fail
        if fail is not None:
            fail()
    while True:
        collectives.reduce()


def run(system: str, name: str, spark: SparkSession | None, folder: str) -> None:
    """Run one case to its error."""
    size = 64 if name == "slots" else _SIZE
    main: Callable[..., Any] = train
    if name in ("slots", "pickle"):
        Path(folder, "fact").touch()
    if name == "pickle":
        lock = threading.Lock()

        def main(*_: Any) -> None:
            with lock:
                pass

    arguments = (folder, system, name)
    if system.startswith("ours"):
        from horovod_runner import HorovodRunner

        np = -size if spark is None else size
        runner = HorovodRunner(np=np, spark=spark, hang_timeout=_HANG_TIMEOUT)
        runner.run(lambda: main(*arguments))
    elif system == "TorchDistributor":
        from pyspark.ml.torch.distributor import TorchDistributor

        TorchDistributor(num_processes=size, local_mode=False, use_gpu=False).run(main, *arguments)
    else:
        import horovod.spark

        horovod.spark.run(main, args=arguments, num_proc=size, verbose=0, use_gloo=True)


@contextlib.contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """A quiet Spark session."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.executor.memory", "1g")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.range(0, _SIZE, 1, _SIZE).mapInArrow(lambda rows: rows, "id long").collect()
    yield spark
    spark.stop()


def drive(system: str, name: str, folder: str, master: str) -> None:
    """The driver process of one case: leaves the error and its time in the folder."""
    with session(master) if system != "ours, np=-2" else contextlib.nullcontext() as spark:
        print("----", flush=True)
        try:
            run(system, name, spark, folder)
            text = ""
        except BaseException:
            text = traceback.format_exc()
        Path(folder, "error").write_text(text)
        os.rename(Path(folder, "error"), Path(folder, "told"))
        sys.stdin.read()  # a notebook's driver lives on: what is left while it does?


class Result(NamedTuple):
    """How one case went.

    Attributes:
        seconds: from the fact to the error; None: there was none within the limit.
        named: the user was told what happened.
        left: how many of the ranks' processes were there five seconds later.
        text: what the user saw.
    """

    seconds: float | None
    named: bool
    left: int
    text: str


def measure(system: str, name: str, master: str, limit: float) -> Result:
    """Run one case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        command = [sys.executable, __file__, "--drive", system, name, folder, master]
        with output.open("wb") as file:
            driver = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        fact, told = Path(folder, "fact"), Path(folder, "told")
        _wait_for(fact, driver, 120)
        _wait_for(told, driver, limit)
        seconds = told.stat().st_mtime - fact.stat().st_mtime if told.exists() else None
        ranks = _processes(folder)
        _, left = psutil.wait_procs(ranks, timeout=5)
        left = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        error = told.read_text() if told.exists() else ""
        assert driver.stdin is not None
        driver.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        for one in _processes(folder):
            with contextlib.suppress(psutil.Error):
                one.kill()
        printed = output.read_text(errors="replace").partition("----\n")[2]
    seen = f"{printed}{error}"
    return Result(seconds, bool(re.search(CAUSES[name].named, seen)), len(left), error or printed)


def _wait_for(path: Path, driver: subprocess.Popen[bytes], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not path.exists() and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.05)


def _processes(folder: str) -> list[psutil.Process]:
    found = []
    for note in Path(folder).glob("pid-*"):
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(int(note.name.removeprefix("pid-"))))
    return found


SYSTEMS = ("ours, np=-2", "ours, np=2", "TorchDistributor", "horovod.spark")


def cell(result: Result | None, limit: float) -> str:
    """One case in a few words."""
    if result is None:
        return "-"
    if result.seconds is None:
        told = f"no error in {limit:.0f} s"
    else:
        told = f"{result.seconds:.1f} s, {'named' if result.named else 'not named'}"
    return f"{told}, {result.left} left"


def measure_all(causes: list[str], systems: list[str], limit: float) -> dict[str, dict[str, Any]]:
    """All cases; by cause and system."""
    sys.path.insert(0, str(ROOT))
    from tests.cluster.standalone import StandaloneCluster

    results: dict[str, dict[str, Any]] = {}
    for name in causes:
        results[name] = {}
        for system in systems:
            if (CAUSES[name].cluster or name == "slots") and system == "ours, np=-2":
                continue  # a machine of one's own has neither executors nor slots
            if CAUSES[name].cluster:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    StandaloneCluster(Path(folder)) as cluster,
                ):
                    result = measure(system, name, cluster.master, limit)
            else:
                result = measure(system, name, f"local[{2 * _SIZE}]", limit)
            results[name][system] = result
            print(f"{name}, {system}: {cell(result, limit)}", file=sys.stderr, flush=True)
    return results


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/failures.md: what the user sees of each cause under this package."""
    parts = [
        "# What you see when a rank fails",
        "",
        "Made by `benchmarks/failures.py --page docs/failures.md`: two ranks in a loop of "
        "allreduces, each with a child process; rank 1 fails. Seconds are from the fact to the "
        f"error on the driver, with `hang_timeout={_HANG_TIMEOUT:g}` for the hangs (its default is "
        "30 minutes); the last column counts processes of the ranks that are left.",
        "",
    ]
    rows = []
    for name, by_system in results.items():
        for system, result in by_system.items():
            if not system.startswith("ours"):
                continue
            launcher = system.partition(", ")[2]
            seconds = "-" if result.seconds is None else f"{result.seconds:.1f}"
            rows.append([CAUSES[name].title, launcher, seconds, str(result.left)])
    parts += [report.table(["what happens", "launcher", "seconds", "left"], rows), ""]
    for name, by_system in results.items():
        result = by_system.get("ours, np=2") or next(iter(by_system.values()))
        parts += [f"## {CAUSES[name].title}", "", "```"]
        parts += [_without_paths(line)[:200] for line in seen_lines(result.text)]
        parts += ["```", ""]
    return "\n".join(parts)


def _without_paths(line: str) -> str:
    """What lies where on this machine is nobody's business."""
    line = line.replace(f"{ROOT}/", "")
    return re.sub(r'(File|folder) "?/\S*?/(site-packages|lib/python3\.\d+)/', r'\1 "', line)


def seen_lines(text: str) -> list[str]:
    """The first lines of an error as the user reads them, without this benchmark's own frames."""
    _, _, cause = text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in cause.splitlines() if not line.startswith("  ")] or [text]
    start = text.index(lines[0]) if lines[0] in text else 0
    told = text[start:]
    # The error proper is its last part; the remote traceback, where there is one, the first.
    direct = text.find("horovod_runner.errors.")
    return (text[direct:] if direct >= 0 else told).splitlines()[:_SHOWN_LINES]


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description="Ways to fail, under four launchers.")
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to wait for an error")
    parser.add_argument("--page", type=Path, help="write what users of this package see there")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    parser.add_argument("--drive", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(*options.drive)
        return
    systems = options.systems
    results = measure_all(options.causes, systems, options.limit)
    if options.page:
        options.page.write_text(page(results))
    rows = [
        [CAUSES[name].title, *(cell(found.get(system), options.limit) for system in systems)]
        for name, found in results.items()
    ]
    print(f"\n{report.machine()}\n")
    print(report.table(["rank 1", *systems], rows))
    if options.json:
        raw = {
            name: {system: each._replace(text="")._asdict() for system, each in found.items()}
            for name, found in results.items()
        }
        report.write_json(options.json, raw)


if __name__ == "__main__":
    main()
