"""How each launcher reports a failed rank: the error, the time to it, and leftover processes.

Twenty ways to fail, with this package on this machine and on Spark, with PySpark's TorchDistributor
and with horovod.spark.run. Every case has its own driver process, so a system that hangs can be
killed. Rank 0 is in the middle of a loop of allreduces when rank 1 fails, and each rank has started
a child process, as DataLoaders do.

    python benchmarks/failures.py [--causes raise kill] [--systems ours] [--limit 60]
    python benchmarks/failures.py --systems "ours, np=-2" "ours, np=2" --page PAGE
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import report

from horovod_runner.host.processes import wait_for_end

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[1]
_SIZE = 2
_WIDTH = 100
# Of a traceback or stack, docs/reference/failures.md shows so many lines from the start and from
# the end.
_FIRST_LINES, _LAST_LINES = 8, 5
_HANG_TIMEOUT = 6.0  # the peers have no such setting


class Cause(NamedTuple):
    """One way to fail.

    Attributes:
        title: its name in the table.
        fail: what rank 1 calls in the middle of its training. None: ``run`` or ``train`` does it.
        named: a regular expression; what the user sees matches it if it says what happened.
        cluster: whether it needs a standalone cluster, with executors that are processes.
    """

    title: str
    fail: Callable[[], Any] | None
    named: str
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
    executor = next(parent for parent in psutil.Process().parents() if parent.name() == "java")
    executor.kill()
    threading.Event().wait()


def _hang_in_native_code() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes years and holds the interpreter's lock


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
    """The two collectives of the training loop, by Horovod or by torch.distributed."""

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
        """Call the collective that every rank calls in each step."""
        self._reduce(self._tensor)

    def call_another(self) -> None:
        """Call a collective that no other rank calls."""
        self._other(self._tensor)


def train(folder: str, system: str, name: str) -> Any:
    """Train as one of the ranks; rank 1 fails. The ranks' ``main``."""
    note = Path(folder)
    # It does not inherit the output: TorchDistributor waits until that is closed.
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (note / f"pid-{os.getpid()}").touch()
    (note / f"pid-{child.pid}").touch()
    collectives = Collectives(system)
    for _ in range(10):
        collectives.reduce()
    if name == "result":
        (note / "failure").touch()
        return threading.Lock()
    if collectives.rank == 1:
        (note / "failure").touch()
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
    """Run one case until it raises its error."""
    size = 64 if name == "slots" else _SIZE
    main: Callable[..., Any] = train
    if name in ("slots", "pickle"):
        Path(folder, "failure").touch()
    if name == "pickle":
        lock = threading.Lock()

        def main(*_: Any) -> None:
            with lock:
                pass

    arguments = (folder, system, name)
    if system.startswith("ours"):
        from horovod_runner import ClusterConfig, DebugConfig, HorovodRunner

        np = -size if spark is None else size
        runner = HorovodRunner(
            np=np,
            cluster_config=ClusterConfig(spark=spark),
            debug_config=DebugConfig(hang_timeout=_HANG_TIMEOUT),
        )
        runner.run(lambda: main(*arguments))
    elif system == "TorchDistributor":
        from pyspark.ml.torch.distributor import TorchDistributor

        TorchDistributor(num_processes=size, local_mode=False, use_gpu=False).run(main, *arguments)
    else:
        import horovod.spark

        horovod.spark.run(main, args=arguments, num_proc=size, verbose=0, use_gloo=True)


@contextlib.contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """A Spark session that logs only errors."""
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
    """Run one case in its driver process, and write the error into the folder."""
    with session(master) if system != "ours, np=-2" else contextlib.nullcontext() as spark:
        print("----", flush=True)
        try:
            run(system, name, spark, folder)
            text = ""
        except BaseException:
            text = traceback.format_exc()
        Path(folder, "error").write_text(text)
        os.rename(Path(folder, "error"), Path(folder, "raised"))
        sys.stdin.read()  # a notebook's driver continues: which processes are left meanwhile?


class Result(NamedTuple):
    """How one case went.

    Attributes:
        seconds: from the failure to the error; None: there was no error within the limit.
        named: whether what the user saw says what happened.
        left: number of the ranks' processes that were still there five seconds later.
        text: the error.
    """

    seconds: float | None
    named: bool
    left: int
    text: str


def measure(system: str, name: str, master: str, limit: float) -> Result:
    """Run one case in a separate driver process."""
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
        failure, raised = Path(folder, "failure"), Path(folder, "raised")
        _wait_for(failure, driver, 120)
        _wait_for(raised, driver, limit)
        seconds = raised.stat().st_mtime - failure.stat().st_mtime if raised.exists() else None
        left = wait_for_end(_processes(folder), 5)
        error = raised.read_text() if raised.exists() else ""
        assert driver.stdin is not None
        driver.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        for process in _processes(folder):
            with contextlib.suppress(psutil.Error):
                process.kill()
        printed = output.read_text(errors="replace").partition("----\n")[2]
    seen = f"{printed}{error}"
    return Result(seconds, bool(re.search(CAUSES[name].named, seen)), len(left), error or printed)


def _wait_for(path: Path, driver: subprocess.Popen[bytes], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not path.exists() and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.05)


def _processes(folder: str) -> list[psutil.Process]:
    processes = []
    for note in Path(folder).glob("pid-*"):
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(int(note.name.removeprefix("pid-"))))
    return processes


SYSTEMS = ("ours, np=-2", "ours, np=2", "TorchDistributor", "horovod.spark")


def cell(result: Result | None, limit: float) -> str:
    """The result of one case, for the table."""
    if result is None:
        return "-"
    if result.seconds is None:
        error = f"no error in {limit:.0f} s"
    else:
        error = f"{result.seconds:.1f} s, {'named' if result.named else 'not named'}"
    return f"{error}, {result.left} left"


def measure_all(causes: list[str], systems: list[str], limit: float) -> dict[str, dict[str, Any]]:
    """Run all cases; returns their results by cause and system."""
    sys.path.insert(0, str(ROOT))
    from tests.cluster.standalone import StandaloneCluster

    results: dict[str, dict[str, Any]] = {}
    for name in causes:
        results[name] = {}
        for system in systems:
            if (CAUSES[name].cluster or name == "slots") and system == "ours, np=-2":
                continue  # ranks without Spark have neither executors nor slots
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
    """The text of docs/reference/failures.md: what the user sees of each cause."""
    parts = [
        "# What you see when a rank fails",
        "",
        "Use this page to recognize an error, and to see what a run reports about it. Twenty ways "
        "to fail follow, each with the message that `run` raises.",
        "",
        "Two ranks are in a loop of allreduces, each with a child process, and rank 1 fails. "
        "*Seconds* are from the failure to the error on the driver; for the hangs with "
        f"`hang_timeout={_HANG_TIMEOUT:g}` (the default is 30 minutes). *Left* is the number of "
        "the ranks' processes that are still there five seconds later. Long tracebacks and stacks "
        "are cut in the middle.",
        "",
        "<!-- benchmarks/failures.py --page docs/reference/failures.md makes this page. -->",
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
        parts += [f"## {CAUSES[name].title}", "", "```text"]
        parts += [*shown_lines(result.text), "```", ""]
    return "\n".join(parts)


def shown_lines(text: str) -> list[str]:
    """The lines of an error for the page: sentences are wrapped, tracebacks cut in the middle.

    Args:
        text: the whole traceback of the driver, whose first part is this package's error.
    """
    error = text[max(0, text.find("horovod_runner.errors.")) :]
    error = error.partition("\nThe above exception was the direct cause")[0].rstrip()
    lines: list[str] = []
    for is_quoted, block in itertools.groupby(error.splitlines(), lambda line: line[:3] == "  |"):
        block_lines = [_without_paths(line) for line in block]
        if is_quoted:
            lines += _cut_in_the_middle([_shortened(line) for line in block_lines])
        else:
            lines += [part for line in block_lines for part in _wrapped(line)]
    return lines


def _cut_in_the_middle(lines: list[str]) -> list[str]:
    if len(lines) <= _FIRST_LINES + _LAST_LINES + 1:
        return lines
    return [*lines[:_FIRST_LINES], "  | ...", *lines[-_LAST_LINES:]]


def _shortened(line: str) -> str:
    return line if len(line) <= 2 * _WIDTH else f"{line[: 2 * _WIDTH]} ..."


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False) or [""]


def _without_paths(line: str) -> str:
    """The line without the folders and the name of the machine that made the page."""
    line = report.anonymous(line)
    return re.sub(r'(File|folder) "?\S*/(?:site-packages|lib/python3\.\d+)/', r'\1 "', line)


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description="Ways to fail, with four launchers.")
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to wait for an error")
    parser.add_argument(
        "--page", type=Path, help="write docs/reference/failures.md: what users of this package see"
    )
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
        [CAUSES[name].title, *(cell(by_system.get(system), options.limit) for system in systems)]
        for name, by_system in results.items()
    ]
    print(f"\n{report.machine()}\n")
    print(report.table(["rank 1", *systems], rows))
    if options.json:
        raw = {
            name: {
                system: result._replace(text="")._asdict() for system, result in by_system.items()
            }
            for name, by_system in results.items()
        }
        report.write_json(options.json, raw)


if __name__ == "__main__":
    main()
