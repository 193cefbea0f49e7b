"""Launch time of an np=2 job on Spark, and duration of a no-op job.

This package, PySpark's TorchDistributor, horovod.spark.run and two floors: a barrier job whose
tasks each run an empty Python, and one whose Pythons import what each of our ranks imports. They
take turns in one process, so that a slow phase of the machine slows all of them.

    python benchmarks/launch.py [--rounds 5] [--systems ours floor] [--json launch.json]
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import report

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_SIZE = 2


class Launch(NamedTuple):
    """One job, in seconds from the call: the slowest rank's first line (if any), and the end."""

    first_line: float | None
    whole_job: float


def note_start(folder: str) -> None:
    """Write the time of the first line into a file for each rank; the job's ``main``.

    Not as a return value: some of the systems return only rank 0's.
    """
    now = time.time()
    with open(os.path.join(folder, str(os.getpid())), "w") as file:
        file.write(repr(now))


def run_ours(spark: SparkSession, folder: str) -> None:
    """Run the job with this package."""
    from horovod_runner import ClusterConfig, HorovodRunner

    HorovodRunner(np=_SIZE, cluster_config=ClusterConfig(spark=spark)).run(
        note_start, folder=folder
    )


def run_torch_distributor(spark: SparkSession, folder: str) -> None:
    """Run the job with PySpark's TorchDistributor, in its distributed mode."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=_SIZE, local_mode=False, use_gpu=False)
    distributor.run(note_start, folder)


def run_horovod_spark(spark: SparkSession, folder: str) -> None:
    """Run the job with horovod.spark.run."""
    import horovod.spark

    # By default it uses mpirun if Horovod was built with any MPI.
    horovod.spark.run(note_start, args=(folder,), num_proc=_SIZE, verbose=0, use_gloo=True)


def run_floor(spark: SparkSession, folder: str) -> None:
    """Run the floor: a child process in each task of a barrier job, as any such launcher must."""
    _run_children(spark, "pass")


def run_floor_with_imports(spark: SparkSession, folder: str) -> None:
    """Run the floor whose children import what a rank imports before ``main``."""
    _run_children(spark, "import horovod_runner.worker.main, cloudpickle")


def _run_children(spark: SparkSession, program: str) -> None:
    def run_child(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            subprocess.run([sys.executable, "-c", program], check=True)
            yield batch

    frame = spark.range(0, _SIZE, 1, _SIZE)
    frame.mapInArrow(run_child, frame.schema, barrier=True).collect()


System = Callable[["SparkSession", str], None]
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
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()  # not the monotonic clock: times of other processes are compared
        system(spark, folder)
        end = time.time()
        starts = [float(file.read_text()) for file in Path(folder).iterdir()]
    if system in (run_floor, run_floor_with_imports):
        return Launch(None, end - start)
    if len(starts) != _SIZE:
        raise RuntimeError(f"{len(starts)} of {_SIZE} ranks ran main")
    return Launch(max(starts) - start, end - start)


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
            run_floor(spark, "")
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


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="Launch time on Spark local[2] at np=2.")
    parser.add_argument("--rounds", type=int, default=5, help="counted launches of each system")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    with make_session() as spark:
        launches, failures = measure_all(spark, options.systems, options.rounds)
    print(f"\n{report.machine()}; medians of {options.rounds} warm launches\n")
    print(seconds_table(launches, failures))
    print()
    print(ratio_table(launches, failures))
    if options.json:
        seconds = {name: [launch._asdict() for launch in launches[name]] for name in launches}
        report.write_json(options.json, {"launches": seconds, "failures": failures})


if __name__ == "__main__":
    main()
