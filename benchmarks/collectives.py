"""Time of an allreduce and of a small training step on CPUs, compared with torch.distributed.

Two ranks of one job on Spark ``local[2]`` with default options. In the same processes, they
alternate between Horovod and torch.distributed's gloo.

    python benchmarks/collectives.py [--turns 9] [--controllers auto gloo] [--json collectives.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import report
from pyspark.sql import SparkSession

from horovod_runner import ClusterConfig, HorovodRunner

_SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20}
_SIZES |= {"100 MB": 100_000_000, "256 MB": 256 << 20}
_STEP = "step of a 16-64-1 network"
_TARGETS = {"100 MB": 1.3}


def measure(sizes: dict[str, int], turns: int) -> dict[str, dict[str, list[float]]]:
    """Time the work on one rank; the ranks' ``main``. Returns seconds by work and system."""
    import time

    import horovod.torch as hvd
    import torch
    import torch.distributed

    hvd.init()
    torch.distributed.init_process_group("gloo")

    def step(distributed: bool) -> Any:
        torch.manual_seed(0)
        layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        net: Any = torch.nn.Sequential(*layers)
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.01)
        if distributed:
            net = torch.nn.parallel.DistributedDataParallel(net)
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        x = torch.randn(32, 16)

        def once() -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        return once

    works: dict[str, tuple[int, dict[str, Any]]] = {}
    for name, size in sizes.items():
        tensor = torch.zeros(size // 4)
        both = {
            "ours": lambda tensor=tensor, name=name: hvd.allreduce_(tensor, name=name, op=hvd.Sum),
            "torch.distributed": lambda tensor=tensor: torch.distributed.all_reduce(tensor),
        }
        works[name] = max(3, min(200, 100_000_000 // size)), both
    works["step"] = 200, {"ours": step(False), "torch.distributed": step(True)}
    found: dict[str, dict[str, list[float]]] = {}
    for name, (count, systems) in works.items():
        seconds = found.setdefault(name, {system: [] for system in systems})
        for turn in range(turns + 1):
            for system in list(systems) if turn % 2 else list(systems)[::-1]:
                torch.distributed.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    systems[system]()
                if turn:  # not timed: it makes buffers and connections
                    seconds[system].append((time.perf_counter() - start) / count)
    torch.distributed.destroy_process_group()
    return found


def main() -> None:
    """Measure, print a table, and write the raw data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--controllers", nargs="*", default=["auto", "gloo"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    raw = {}
    print(report.machine())
    for controller in options.controllers:
        runner = HorovodRunner(
            np=2, cluster_config=ClusterConfig(cpu_collectives=controller, spark=spark)
        )
        found = runner.run(measure, sizes=_SIZES, turns=options.turns)
        assert runner.last_run is not None
        raw[f"{controller}: {runner.last_run.controller}"] = found
        rows = []
        for name, systems in found.items():
            ours, theirs = (median(seconds) for seconds in systems.values())
            work = _STEP if name == "step" else name
            target = [f"{theirs / ours:.1f}", "-", "-"]
            if controller == "auto":
                what = f"torch.distributed / ours, {work}"
                target = report.at_least(what, theirs / ours, _TARGETS.get(name, 1.0))
            rows.append([work, f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", *target])
        heads = ["milliseconds", f"ours ({runner.last_run.controller})", "torch.distributed"]
        print(f"\n{report.table([*heads, 'ratio', 'target', ''], rows)}")
    if options.json:
        report.write_json(options.json, {"seconds": raw})


if __name__ == "__main__":
    main()
