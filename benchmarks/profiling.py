"""What the profile of a run costs a training.

Two ranks train a small network, whose step takes about a millisecond, and ResNet-20. Series of
steps with and without the profiler alternate in the same processes; so do two kinds without it,
which show the noise. "With" is all that a rank does for its profile: the looks at the lines, the
summary of each second, and sending it.

    python benchmarks/profiling.py [--rounds 5] [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import report

from horovod_runner import DebugConfig, HorovodRunner

_SECONDS = 2.5  # of a series: two summaries
_SERIES = 6  # of each kind in a round
_TARGET = 1.01
_KINDS = ("without", "with", "without again")


def train(kind: str, series: int, seconds: float) -> dict[str, list[float]]:
    """The ranks' ``main``: the mean step of each series, by the kind of series."""
    import os
    import time

    import horovod.torch as hvd
    import torch
    from resnet import resnet20

    from horovod_runner.wire import messages
    from horovod_runner.worker.profiling.profiler import Profiler

    hvd.init()
    if kind == "small":
        net: Any = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        )
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    else:
        net, x, y = resnet20(), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    plain = torch.optim.SGD(net.parameters(), 0.001)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    nowhere = os.open(os.devnull, os.O_WRONLY)

    def send(message: Any) -> None:
        os.write(nowhere, messages.encode(message))

    for _ in range(10):
        step()
    began = time.perf_counter()
    for _ in range(10):
        step()
    taken = torch.tensor(time.perf_counter() - began)
    count = max(10, int(10 * seconds / float(hvd.allreduce(taken, name="count"))))
    found: dict[str, list[float]] = {"without": [], "with": [], "without again": []}
    for number in range(series):
        names = list(found)
        for name in names[number % 3 :] + names[: number % 3]:
            hvd.barrier()
            profiler = Profiler(hvd.rank(), 2, send, send) if name == "with" else None
            began = time.perf_counter()
            for _ in range(count):
                step()
            found[name].append((time.perf_counter() - began) / count)
            if profiler is not None:
                profiler.finish()
    return found


def measure(kind: str, rounds: int) -> dict[str, list[float]]:
    """Rank 0's seconds of a step, by kind of series."""
    found: dict[str, list[float]] = {name: [] for name in _KINDS}
    for number in range(rounds):
        runner = HorovodRunner(np=-2, progress=False, debug_config=DebugConfig(profile=False))
        for name, values in runner.run(train, kind=kind, series=_SERIES, seconds=_SECONDS).items():
            found[name] += values
        shown = {name: f"{median(values) * 1e3:.3f} ms" for name, values in found.items()}
        print(f"round {number + 1}  {kind}: {shown}", file=sys.stderr, flush=True)
    return found


def table(steps: dict[str, dict[str, list[float]]]) -> str:
    """The table of steps with the profile, divided by those without: of the series in pairs."""
    rows = []
    for title, found in steps.items():
        none, profiled, again = (found[name] for name in _KINDS)
        pairs = [2 * b / (a + c) for a, b, c in zip(none, profiled, again, strict=True)]
        noise = [c / a for a, c in zip(none, again, strict=True)]
        quick = [quantiles(values, n=10)[0] for values in (none, profiled, again)]
        verdict = report.at_most(f"steps with profile / without, {title}", median(pairs), _TARGET)
        rows.append(
            [
                title,
                f"{median(none) * 1e3:.2f}",
                f"{median(pairs):.4f}",
                *verdict[1:],
                f"{median(noise):.4f}",
                f"{2 * quick[1] / (quick[0] + quick[2]):.4f}",
            ]
        )
    heads = ["steps with / without", "ms", "median", "target", "", "noise", "fastest tenth"]
    return report.table(heads, rows)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="What the profile of a run costs a training.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    raw = {kind: measure(kind, options.rounds) for kind in ("small", "ResNet-20")}
    print(f"\n{report.machine()}; {options.rounds} rounds\n\n{table(raw)}")
    if options.json:
        report.write_json(options.json, raw)


if __name__ == "__main__":
    main()
