"""Throughput of two ranks compared with two processes that do not communicate.

ResNet-20 for images of 32 x 32 with 128 images in a global batch as in He et al. 2016, on CPUs. Two
ranks on this machine process 64 each, in turns in the same processes:

- *alone*: each rank trains separately, with Horovod shut down. Their samples/s are added.
- *slower*: calculated from *alone*: each step takes as long as the slower rank's. Synchronized
  ranks cannot be faster, so no data-parallel training can avoid this loss.
- *barrier*: as *alone*, with a barrier in each step. Ranks that also reduce can hardly be faster.
- *ranks*: the ranks train together, without the check of their weights.
- *DDP*: the same with torch.distributed's DistributedDataParallel over gloo, Horovod shut down.
- *all threads*: as *ranks*, but each rank's torch uses all cores, as it does when a launcher sets
  no number of threads.

    python benchmarks/scaling.py [--turns 20] [--batch 64] [--json scaling.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import report

from horovod_runner import ClusterConfig, DebugConfig, HorovodRunner

_STEPS = 4  # in a turn: the machine's speed changes within seconds


def train(turns: int, batch: int) -> dict[str, list[list[float]]]:
    """Time each step; the ranks' ``main``. Returns seconds by way and turn, of both ranks."""
    import os
    import time
    from functools import partial

    import horovod.torch as hvd
    import torch
    import torch.distributed
    from resnet import resnet20
    from torch import nn

    own_threads = torch.get_num_threads()

    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def steps(net: Any, optimizer: Any, count: int = _STEPS, barrier: bool = False) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            if barrier:
                hvd.barrier()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def without_horovod(*pair: Any) -> list[float]:
        hvd.shutdown()
        return steps(*pair)

    def all_threads() -> list[float]:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            return steps(net, optimizer)
        finally:
            torch.set_num_threads(own_threads)

    hvd.init()
    torch.distributed.init_process_group("gloo")
    own_net, net = resnet20(), resnet20()
    ddp_net = nn.parallel.DistributedDataParallel(resnet20())
    own_optimizer = torch.optim.SGD(own_net.parameters(), 0.01)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    ddp_optimizer = torch.optim.SGD(ddp_net.parameters(), 0.01)
    for pair in ((own_net, own_optimizer), (net, optimizer), (ddp_net, ddp_optimizer)):
        steps(*pair, 3)
    ways = {
        "alone": partial(without_horovod, own_net, own_optimizer),
        "barrier": partial(steps, own_net, own_optimizer, barrier=True),
        "ranks": partial(steps, net, optimizer),
        "DDP": partial(without_horovod, ddp_net, ddp_optimizer),
        "all threads": all_threads,
    }
    found: dict[str, list[list[float]]] = {}
    for turn in range(turns):
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            hvd.barrier()
            seconds = ways[name]()
            hvd.init()
            both = hvd.allgather(torch.tensor(seconds, dtype=torch.float64), name="both")
            found.setdefault(name, []).append(both.tolist())
    return found


def main() -> None:
    """Measure, print a table, and write the raw data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="of one rank")
    parser.add_argument("--controllers", nargs="*", default=["auto", "gloo"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(report.machine())
    raw = {}
    for controller in options.controllers:
        runner = HorovodRunner(
            np=-2,
            cluster_config=ClusterConfig(cpu_collectives=controller),
            # The networks that the ranks train alone differ, which would be looked for and said.
            debug_config=DebugConfig(weight_check=None),
        )
        found = runner.run(train, turns=options.turns, batch=options.batch)
        assert runner.last_run is not None
        raw[str(runner.last_run.controller)] = found
        rates = {
            name: [_rate(turn, options.batch) for turn in turns] for name, turns in found.items()
        }
        rates["slower"] = [_rate(_slower(turn), options.batch) for turn in found["alone"]]
        rows = []
        for name, peer, target in (
            ("ranks", "alone", None),
            ("slower", "alone", None),
            ("barrier", "alone", None),
            ("DDP", "alone", None),
            ("ranks", "slower", None),
            ("ranks", "barrier", 0.95),
            ("ranks", "DDP", None),
            ("ranks", "all threads", 1.5),
        ):
            ratio = median(a / b for a, b in zip(rates[name], rates[peer], strict=True))
            cells = ["", "-", "-"]
            if target:
                what = f"samples/s, {name} / {peer} ({runner.last_run.controller})"
                cells = report.at_least(what, ratio, target)
            rows.append([f"{name} / {peer}", f"{median(rates[name]):.0f}"])
            rows[-1] += [f"{median(rates[peer]):.0f}", f"{ratio:.2f}", *cells[1:]]
        heads = [f"samples/s ({runner.last_run.controller})", "first", "second", "ratio"]
        print(f"\n{report.table([*heads, 'target', ''], rows)}")
    if options.json:
        report.write_json(options.json, {"batch": options.batch, "seconds": raw})


def _rate(both: list[float], batch: int) -> float:
    """Samples per second of both ranks together, each by its own clock."""
    return sum(batch * _STEPS / sum(own) for own in (both[:_STEPS], both[_STEPS:]))


def _slower(both: list[float]) -> list[float]:
    """Samples per second if each step takes as long as the slower rank's."""
    return [max(pair) for pair in zip(both[:_STEPS], both[_STEPS:], strict=True)] * 2


if __name__ == "__main__":
    main()
