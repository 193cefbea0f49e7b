"""Time of prepare_data, compared with a gather to one rank and a scatter by mpi4py.

    python benchmarks/prepare_data.py [--megabytes 1000] [--turns 5]

1 GB of rows moves from four ranks to the two of them that train, under Open MPI on one machine.
Each turn times both, in changing order, from the moment when all ranks are ready until the last one
has its rows. Memory is a rank's maximum beyond its memory before and its share.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report

ROW = 1000  # four bytes each
TRAINERS = 2
_TARGET = 2.0


def gather_and_scatter(x: np.ndarray[Any, Any], comm: Any) -> np.ndarray[Any, Any]:
    """Move rows as one would with mpi4py: the peer."""
    from mpi4py import MPI

    rows = comm.gather(len(x), root=0)
    whole = np.empty((sum(rows), ROW), x.dtype) if comm.rank == 0 else None
    counts = None if rows is None else [n * ROW for n in rows]
    comm.Gatherv(x, [whole, counts, MPI.FLOAT] if comm.rank == 0 else None, root=0)
    shares = None
    if rows is not None:
        each, more = divmod(sum(rows), TRAINERS)
        shares = [each + (i < more) for i in range(TRAINERS)] + [0] * (comm.size - TRAINERS)
    share = np.empty((comm.scatter(shares, root=0), ROW), x.dtype)
    sent = [whole, [n * ROW for n in shares], MPI.FLOAT] if shares is not None else None
    comm.Scatterv(sent, share, root=0)
    return share


def memory(name: str) -> int:
    """VmRSS, or VmHWM, of this process in bytes."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def timed(comm: Any, work: Callable[[], np.ndarray[Any, Any]]) -> tuple[float, float, float]:
    """Seconds until all ranks have their rows; a rank's maximum memory and its share, in MB."""
    from mpi4py import MPI

    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    comm.Barrier()
    began = time.perf_counter()
    share = work()
    comm.Barrier()
    seconds = time.perf_counter() - began
    taken = (memory("VmHWM") - before) / 1e6
    most = [comm.allreduce(each, op=MPI.MAX) for each in (taken, share.nbytes / 1e6)]
    return seconds, most[0], most[1]


def rank(megabytes: int, turns: int, json: Path | None) -> None:
    """Run all turns as one of the ranks; rank 0 prints the table."""
    os.environ["MPI4PY_MPIABI"] = "openmpi"  # not that of the installed mpich package
    from mpi4py import MPI

    from horovod_runner import spmd

    comm = MPI.COMM_WORLD
    x = np.full((megabytes * 1_000_000 // 4 // ROW // comm.size, ROW), comm.rank, np.float32)
    spmd.start("torch", ranks_per_host=TRAINERS)
    ways = {
        "prepare_data": lambda: spmd.prepare_data(x),
        "peer": lambda: gather_and_scatter(x, comm),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks = {}
    for turn in range(turns + 1):
        for name in sorted(ways, reverse=bool(turn % 2)):
            took, *sizes = timed(comm, ways[name])
            if turn:
                seconds[name].append(took)
            else:  # not timed: memory is faster to allocate the second time
                peaks[name] = sizes
    spmd.end()
    if comm.rank:
        return
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [p / o for o, p in zip(seconds["prepare_data"], seconds["peer"], strict=True)]
    print(f"{megabytes} MB from {comm.size} ranks to {TRAINERS}, {turns} turns")
    for name, each in medians.items():
        taken, share = peaks[name]
        print(f"{name:13} {each:.3f} s, {taken:.0f} MB at most for a share of {share:.0f} MB")
    listed = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    ratio = statistics.median(ratios)
    what = f"{megabytes} MB, gather and scatter by mpi4py / prepare_data"
    _, target, verdict = report.at_least(what, ratio, _TARGET)
    print(f"ratio by turn {listed}; median {ratio:.2f} times faster ({target}: {verdict})")
    if json is not None:
        report.write_json(json, {"seconds": seconds, "megabytes": peaks})


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        rank(options.megabytes, options.turns, options.json)
        return
    mpirun = [
        shutil.which("mpirun.openmpi") or "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "4",
    ]
    subprocess.run([*mpirun, sys.executable, *sys.argv], check=True)


if __name__ == "__main__":
    main()
