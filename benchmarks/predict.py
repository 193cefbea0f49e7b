"""A DataFrame scored by ``predict``, against pyspark's own ways, in rows per second.

    python benchmarks/predict.py [--rounds 3] [--scale 1.0] [--json FILE]

Two tables of Parquet files: narrow rows (16 float columns to a 16-64-1 network) and vectors of 784
floats (to a 784-64-10 network). All systems run in one Spark session of two cores, take turns in a
different order each round, and write to Spark's ``noop`` sink: all columns of the narrow rows, and
the id alone beside the predictions for vectors. The table also has the peak memory of a worker.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import launch
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import report
import torch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH = 4096
NARROW = [f"c{number}" for number in range(16)]


def write_tables(folder: Path, scale: float) -> None:
    """Write both tables as four Parquet files each."""
    rng = np.random.default_rng(0)
    for part in range(4):
        rows = int(500_000 * scale)
        columns = {name: rng.random(rows, np.float32) for name in NARROW}
        write(folder / "narrow", part, pa.table(columns))
        rows = int(15_000 * scale)
        flat = pa.array(rng.random(rows * 784, np.float32))
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 784)
        vectors = pa.ListArray.from_arrays(offsets, flat)
        write(folder / "vector", part, pa.table({"id": np.arange(rows), "x": vectors}))


def write(folder: Path, part: int, table: pa.Table) -> None:
    """Write one file of a table."""
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=1 << 17)


def network(table: str) -> torch.nn.Module:
    """The network for a table."""
    torch.manual_seed(0)
    wide, out = (16, 1) if table == "narrow" else (784, 10)
    return torch.nn.Sequential(torch.nn.Linear(wide, 64), torch.nn.ReLU(), torch.nn.Linear(64, out))


def ours(df: DataFrame, table: str, net: torch.nn.Module) -> DataFrame:
    """Score with this package, told the types as predict_batch_udf has to be."""
    from horovod_runner import predict

    if table == "narrow":
        return predict(df, net, {"x": NARROW}, {"p": "float"}, batch_size=BATCH)
    return predict(df, net, {"x": "x"}, {"p": "array<float>"}, batch_size=BATCH, keep=["id"])


def batch_udf(df: DataFrame, table: str, net: torch.nn.Module) -> DataFrame:
    """Score with pyspark's predict_batch_udf."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, FloatType

    is_narrow = table == "narrow"

    def make() -> Callable[[Any], Any]:
        def predict(x: Any) -> Any:
            with torch.inference_mode():
                out = net(torch.from_numpy(np.ascontiguousarray(x))).numpy()
            return out[:, 0] if is_narrow else out

        return predict

    function = predict_batch_udf(
        make,
        return_type=FloatType() if is_narrow else ArrayType(FloatType()),
        batch_size=BATCH,
        input_tensor_shapes=[[16 if is_narrow else 784]],
    )
    if is_narrow:
        return df.withColumn("p", function(f.array(*NARROW)))
    return df.select("id", function("x").alias("p"))


def plain_map(df: DataFrame, table: str, net: torch.nn.Module) -> DataFrame:
    """Score with mapInArrow by hand: what a careful user would write."""
    is_narrow = table == "narrow"

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if is_narrow:
                x = np.stack([column.to_numpy() for column in batch.columns], axis=1)
            else:
                x = batch.column("x").flatten().to_numpy().reshape(batch.num_rows, -1)
            with torch.inference_mode():
                out = net(torch.from_numpy(x.copy())).numpy()
            if is_narrow:
                p, kept = pa.array(out[:, 0]), NARROW
            else:
                offsets = pa.array(np.arange(len(out) + 1, dtype=np.int32) * 10)
                p, kept = pa.ListArray.from_arrays(offsets, pa.array(out.reshape(-1))), ["id"]
            arrays = [*(batch.column(name) for name in kept), p]
            yield pa.RecordBatch.from_arrays(arrays, [*kept, "p"])

    kept_schema = ", ".join(f"{name} float" for name in NARROW) if is_narrow else "id bigint"
    return df.mapInArrow(score, f"{kept_schema}, p {'float' if is_narrow else 'array<float>'}")


SYSTEMS: dict[str, Callable[[Any, str, torch.nn.Module], Any]] = {
    "ours": ours,
    "predict_batch_udf": batch_udf,
    "mapInArrow by hand": plain_map,
}


class Peak:
    """The largest memory of this process's Python workers meanwhile, in MB; a context manager."""

    def __enter__(self) -> Peak:
        self.megabytes = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        # Seldom, and without a look into memory maps: both would take time from what is measured.
        while not self._end.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name().startswith("python"):
                        used = process.memory_info().rss / 1e6
                        self.megabytes = max(self.megabytes, used)
                except psutil.Error:
                    continue

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def measure(folder: Path, rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Seconds and MB of each system in each round, by table; a first round does not count."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with launch.make_session() as spark:
        for table in ("narrow", "vector"):
            df, net = spark.read.parquet(str(folder / table)), network(table)
            found[table] = {name: [] for name in SYSTEMS}
            for turn in range(rounds + 1):
                for name in random.Random(turn).sample(list(SYSTEMS), len(SYSTEMS)):
                    with Peak() as peak:
                        began = time.perf_counter()
                        scored = SYSTEMS[name](df, table, net)
                        scored.write.mode("overwrite").format("noop").save()
                        seconds = time.perf_counter() - began
                    print(f"{table} {turn} {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
                    if turn:
                        found[table][name].append((seconds, peak.megabytes))
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows")
    parser.add_argument("--json", type=Path, help="where the raw data go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), arguments.scale)
        found = measure(Path(folder), arguments.rounds)
    rows = []
    for table, target in (("narrow", 2.0), ("vector", 1.5)):
        seconds = {name: median(s for s, _ in turns) for name, turns in found[table].items()}
        for name, turns in found[table].items():
            told = ["", "", ""]
            if name == "ours":
                ratio = seconds["predict_batch_udf"] / seconds["ours"]
                told = report.at_least(f"{table}: predict_batch_udf / ours", ratio, target)
            memory = max(megabytes for _, megabytes in turns)
            rows.append([table, name, f"{seconds[name]:.2f}", f"{memory:.0f}", *told])
    heads = ["rows", "system", "s", "MB of a worker", "predict_batch_udf / ours", "target", ""]
    print(f"\n{report.machine()}; {arguments.rounds} rounds\n")
    print(report.table(heads, rows))
    if arguments.json:
        report.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
