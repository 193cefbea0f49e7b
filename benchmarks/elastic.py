"""Seconds without steps when one of four ranks is killed: this package beside Horovod Elastic.

The same training, written for ``hvd.elastic``, runs in turn

- with local ranks, ``np=(-2, -4)``: the lost rank is replaced;
- on Spark ``local[4]``, ``np=(2, 4)``;
- under ``horovodrun`` with a host discovery script that names two hosts, which are both this
  machine. Horovod goes on without the host of the lost rank.

The pause is the time from the kill to the end of the first step after it.

    python benchmarks/elastic.py [--turns 5] [--json elastic.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import elastic_training
import report

from horovod_runner import ClusterConfig, HorovodRunner

_TARGET_SECONDS = 3.0
_TARGET_RATIO = 3.0
_TRAINING = Path(elastic_training.__file__)
_LIMIT_SECONDS = 300.0


def _ours(np: tuple[int, int], cluster: ClusterConfig | None = None) -> Callable[[Path], None]:
    def train(notes: Path) -> None:
        runner = HorovodRunner(
            np=np, max_restarts=2, grow_after=3600, progress=False, cluster_config=cluster
        )
        runner.run(elastic_training.main, notes=str(notes))

    return train


def _horovods(notes: Path) -> None:
    discovery = notes.with_suffix(".sh")
    discovery.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:2\n")
    discovery.chmod(0o755)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [horovodrun, "-np", "4", "--min-np", "2", "--max-np", "4", "--gloo"]
    command += ["--host-discovery-script", discovery, sys.executable, _TRAINING, notes]
    with notes.with_suffix(".log").open("wb") as log:
        subprocess.run(
            list(map(str, command)),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,  # the lost rank makes it fail
            timeout=_LIMIT_SECONDS,
            env={**os.environ, "PATH": f"{horovodrun.parent}:{os.environ['PATH']}"},
        )


def pause(notes: Path) -> float:
    """Seconds from the kill to the end of the next step."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    (killed,) = [when for ranks, when in lines if ranks == 0]
    later = [(ranks, when) for ranks, when in lines if when > killed]
    if len(later) < elastic_training.STEPS_AFTER - 1:
        raise SystemExit(f"the training did not go on: {lines[-3:]}, see {notes}")
    return float(later[0][1] - killed)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    ways = {
        "local ranks": _ours((-2, -4)),
        "Spark local[4]": _ours((2, 4), ClusterConfig(spark=spark)),
        "Horovod Elastic": _horovods,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for number, (name, train) in enumerate(ways.items()):
                notes = Path(folder, f"{turn}-{number}")
                train(notes)
                found[name].append(pause(notes))
                print(f"turn {turn} {name}: {found[name][-1]:.2f} s", file=sys.stderr, flush=True)
    spark.stop()
    peer = median(found.pop("Horovod Elastic"))
    rows = []
    for name, seconds in found.items():
        ours = median(seconds)
        verdict = report.at_most(f"pause after a lost rank, {name}", ours, _TARGET_SECONDS, "s")
        ratio = report.at_least(f"Horovod Elastic / {name}", peer / ours, _TARGET_RATIO)
        rows.append([name, *verdict, f"{max(seconds):.2f}", *ratio])
    print(f"\n{report.machine()}; medians of {options.turns} turns; Horovod Elastic {peer:.1f} s\n")
    heads = ["", "pause in s", "target", "", "longest", "Horovod Elastic / ours", "target", ""]
    print(report.table(heads, rows))
    if options.json:
        report.write_json(options.json, {"seconds": {**found, "Horovod Elastic": peer}})


if __name__ == "__main__":
    main()
