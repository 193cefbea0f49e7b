"""Time to the first collective of a run with torch, cold and with preloaded frameworks.

The second run of a notebook: a session exists and has run once. Cold and warm starts
(``preload_frameworks=True``) alternate, on Spark ``local[2]`` and with local ranks.

    python benchmarks/warm_start.py [--turns 7] [--json warm_start.json]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import report
from launch import make_session

from horovod_runner import ClusterConfig, HorovodRunner

_TARGET_SECONDS = 0.5
_PAUSE_SECONDS = 2.0  # seconds between runs, as in a notebook


def first_collective() -> float:
    """Run one collective; the ranks' ``main``. Returns the time when it was done."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1))
    return time.time()  # a clock that is the same in all processes


def measure(np: int, turns: int) -> dict[str, list[float]]:
    """Seconds from the call of ``run`` to the end of the first collective."""
    runners = {
        "cold": HorovodRunner(np=np),
        "warm": HorovodRunner(np=np, cluster_config=ClusterConfig(preload_frameworks=True)),
    }
    found: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(turns + 1):
        for name, runner in runners.items():
            began = time.time()
            seconds = runner.run(first_collective) - began
            print(f"np={np} turn {turn} {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
            if turn:  # not timed: the first warm start is cold
                found[name].append(seconds)
            time.sleep(_PAUSE_SECONDS)
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    with make_session():
        raw = {"Spark, np=2": measure(2, options.turns), "np=-2": measure(-2, options.turns)}
    rows = []
    for where, found in raw.items():
        cold, warm = median(found["cold"]), median(found["warm"])
        verdict = report.at_most(f"first collective, warm, {where}", warm, _TARGET_SECONDS, "s")
        rows.append([where, f"{cold:.2f}", *verdict, f"{cold / warm:.1f}"])
    print(f"\n{report.machine()}; medians of {options.turns} turns\n")
    print(report.table(["seconds", "cold", "warm", "target", "", "cold / warm"], rows))
    if options.json:
        report.write_json(options.json, {"seconds": raw})


if __name__ == "__main__":
    main()
