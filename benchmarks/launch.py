"""Launch time of an np=2 job on Spark, and duration of a no-op job.

This package, PySpark's TorchDistributor, horovod.spark.run and two floors: a barrier job whose
tasks each run an empty Python, and one whose Pythons import what each of our ranks imports. They
take turns in one process, so that a slow phase of the machine slows all of them.

    python benchmarks/launch.py [--rounds 5] [--systems ours floor] [--json launch.json]
    python benchmarks/launch.py --on yarn    # or kubernetes: real ones, as tests/engines has them
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # for tests/engines

import report

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_SIZE = 2


class Launch(NamedTuple):
    """One job, in seconds from the call: the slowest rank's first line (if any), and the end."""

    first_line: float | None
    whole_job: float


Address = tuple[str, int]


def tell_start(address: Address) -> None:
    """Send the time of the first line to the driver; the job's ``main``.

    Not as a return value: some of the systems return only rank 0's.
    """
    now = time.time()
    with socket.create_connection(address) as driver:
        driver.sendall(repr(now).encode())


def run_ours(spark: SparkSession, address: Address) -> None:
    """Run the job with this package."""
    from horovod_runner import ClusterConfig, HorovodRunner

    HorovodRunner(np=_SIZE, cluster_config=ClusterConfig(spark=spark)).run(
        tell_start, address=address
    )


def run_torch_distributor(spark: SparkSession, address: Address) -> None:
    """Run the job with PySpark's TorchDistributor, in its distributed mode."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=_SIZE, local_mode=False, use_gpu=False)
    distributor.run(tell_start, address)


def run_horovod_spark(spark: SparkSession, address: Address) -> None:
    """Run the job with horovod.spark.run."""
    import horovod.spark

    # By default it uses mpirun if Horovod was built with any MPI.
    horovod.spark.run(tell_start, args=(address,), num_proc=_SIZE, verbose=0, use_gloo=True)


def run_floor(spark: SparkSession, address: Address) -> None:
    """Run the floor: a child process in each task of a barrier job, as any such launcher must."""
    _run_children(spark, "pass")


def run_floor_with_imports(spark: SparkSession, address: Address) -> None:
    """Run the floor whose children import what a rank imports before ``main``."""
    _run_children(spark, "import horovod_runner.worker.main, cloudpickle")


def _run_children(spark: SparkSession, program: str) -> None:
    def run_child(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            subprocess.run([sys.executable, "-c", program], check=True)
            yield batch

    frame = spark.range(0, _SIZE, 1, _SIZE)
    frame.mapInArrow(run_child, frame.schema, barrier=True).collect()


System = Callable[["SparkSession", Address], None]
SYSTEMS: dict[str, System] = {
    "ours": run_ours,
    "TorchDistributor": run_torch_distributor,
    "horovod.spark": run_horovod_spark,
    "floor": run_floor,
    "floor with imports": run_floor_with_imports,
}


def measure(system: System, spark: SparkSession) -> Launch:
    """Run one job.

    Raises:
        RuntimeError: the job ended without an error, but not all ranks ran ``main``.
    """
    has_main = system not in (run_floor, run_floor_with_imports)
    with socket.create_server(("", 0), backlog=_SIZE) as server:
        server.settimeout(0)  # what the ranks have sent waits in the backlog
        start = time.time()  # not the monotonic clock: times of other processes are compared
        system(spark, (spark.conf.get("spark.driver.host"), server.getsockname()[1]))
        end = time.time()
        try:
            starts = [_received(server) for _ in range(_SIZE * has_main)]
        except BlockingIOError:
            raise RuntimeError(f"not all of {_SIZE} ranks ran main") from None
    return Launch(max(starts) - start if starts else None, end - start)


def _received(server: socket.socket) -> float:
    connection, _ = server.accept()
    with connection, connection.makefile() as text:
        return float(text.read())


def measure_all(
    spark: SparkSession, names: list[str], rounds: int
) -> tuple[dict[str, list[Launch]], dict[str, str]]:
    """Launch the named systems in turns, after an uncounted launch of each.

    Returns:
        The launches of each system, and the error of each system that failed.
    """
    launches: dict[str, list[Launch]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for turn in range(rounds + 1):
        # In a different order each round: no system always follows the same one.
        for name in random.Random(turn).sample(names, len(names)):
            if name in failures:
                continue
            # Uncounted, so that no system starts with the Python workers that another one left:
            # TorchDistributor's tasks end theirs, and the next job has to start new ones.
            run_floor(spark, ("", 0))
            try:
                launch = measure(SYSTEMS[name], spark)
            except Exception as error:
                # A peer that cannot run here becomes a line of the table.
                lines = str(error).strip().splitlines() or [""]
                failures[name] = f"{type(error).__name__}: {lines[0]}"
                continue
            print(f"round {turn}  {name}: {launch.whole_job:.2f} s", file=sys.stderr, flush=True)
            if turn:
                launches[name].append(launch)
    return launches, failures


def seconds_table(launches: dict[str, list[Launch]], failures: dict[str, str]) -> str:
    """Median seconds of each system."""
    rows = []
    for name, found in launches.items():
        if name in failures:
            rows.append([name, "failed", failures[name]])
            continue
        firsts = [launch.first_line for launch in found if launch.first_line is not None]
        first = f"{median(firsts):.2f}" if firsts else "-"
        rows.append([name, first, f"{median(launch.whole_job for launch in found):.2f}"])
    return report.table(["median seconds", "first line of main", "whole job"], rows)


def _unjudged(_what: str, value: float, _target: float) -> list[str]:
    return [f"{value:.2f}", "-", ""]


def ratio_table(launches: dict[str, list[Launch]], failures: dict[str, str]) -> str:
    """The ratios that have targets; "not run" where one side failed."""

    def first(name: str) -> float:
        return median(launch.first_line or 0.0 for launch in launches[name])

    def whole(name: str) -> float:
        return median(launch.whole_job for launch in launches[name])

    targets = [
        ("TorchDistributor", "ours", "first line", first, report.at_least, 8),
        ("horovod.spark", "ours", "first line", first, report.at_least, 4),
        ("TorchDistributor", "ours", "whole job", whole, report.at_least, 4),
        ("horovod.spark", "ours", "whole job", whole, report.at_least, 4),
        ("ours", "floor", "whole job", whole, _unjudged, 0),
        ("ours", "floor with imports", "whole job", whole, report.at_most, 1.5),
    ]
    rows = []
    for above, below, what, seconds, judge, target in targets:
        ran = {above, below} <= launches.keys() - failures.keys()
        told = f"{above} / {below}, {what}"
        ratio = seconds(above) / seconds(below) if ran else 0.0
        rows.append([told, *(judge(told, ratio, target) if ran else ["-", "-", "not run"])])
    return report.table(["ratio", "measured", "target", ""], rows)


def make_session() -> SparkSession:
    """A ``local[2]`` session with few logs whose tasks run this interpreter."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local[{_SIZE}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextmanager
def session_on(engine: str) -> Iterator[SparkSession]:
    """A session with two executors of one core each on an engine that is started for it."""
    if engine == "local":
        with make_session() as spark:
            yield spark
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from tests.places import classic_session

    with ExitStack() as stack:
        if engine == "yarn":
            from tests.engines import hadoop
            from tests.engines.test_yarn import settings

            running = stack.enter_context(hadoop.running())
            os.environ.update(running.environment)
            conf = settings(running)
        else:
            from tests.engines.kubernetes.checkout import Checkout
            from tests.engines.kubernetes.cluster import Cluster

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k8s-")))
            checkout = Checkout(stack.enter_context(Cluster(folder)))
            os.environ["KUBECONFIG"] = str(checkout.cluster.kubeconfig)
            conf = checkout.client_settings()
        spark = stack.enter_context(classic_session(conf))
        # Both executors have come before the first turn, of whichever system.
        from horovod_runner import ClusterConfig, HorovodRunner

        slots = ClusterConfig(spark=spark, slot_timeout=300)
        HorovodRunner(np=_SIZE, cluster_config=slots).run(int)
        yield spark


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="Launch time on Spark at np=2.")
    parser.add_argument("--on", choices=("local", "yarn", "kubernetes"), default="local")
    parser.add_argument("--rounds", type=int, default=5, help="counted launches of each system")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    with session_on(options.on) as spark:
        launches, failures = measure_all(spark, options.systems, options.rounds)
    print(f"\n{report.machine()}; {options.on}; medians of {options.rounds} warm launches\n")
    print(seconds_table(launches, failures))
    print()
    print(ratio_table(launches, failures))
    if options.json:
        seconds = {name: [launch._asdict() for launch in launches[name]] for name in launches}
        report.write_json(options.json, {"launches": seconds, "failures": failures})


if __name__ == "__main__":
    main()
