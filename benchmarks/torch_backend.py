"""Time of torch.distributed over its backends hvd and gloo: collectives, DDP and FSDP2.

Two local ranks with default options. In the same processes, groups of both backends alternate.

    python benchmarks/torch_backend.py [--turns 7] [--json torch_backend.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import report

from horovod_runner import HorovodRunner

_SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20}
_SIZES |= {"100 MB": 100_000_000}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_SMALL, _RESNET, _TRANSFORMER = "16-64-1 network", "ResNet-20", "transformer of 20M"
# The steps of a turn. Networks that compute long have more turns, because of the noise.
_STEPS = {_SMALL: 200, _RESNET: 4, _TRANSFORMER: 2}
_MORE_TURNS = 3
_TARGETS = {
    "all_reduce, 64 KB": 3.0,
    "all_reduce, 100 MB": 2.0,
    f"DDP step, {_SMALL}": 2.0,
    f"DDP step, {_RESNET}": 1.0,
    f"DDP step, {_TRANSFORMER}": 1.0,
    f"FSDP2 step, {_RESNET}": 1.0,
    f"FSDP2 step, {_TRANSFORMER}": 1.0,
}


def small() -> tuple[Any, Any]:
    """A small network and a batch for it."""
    import torch

    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    return torch.nn.Sequential(*layers), torch.randn(32, 16)


def resnet() -> tuple[Any, Any]:
    """ResNet-20 and a batch of 32 images."""
    import torch
    from resnet import resnet20

    return resnet20(), torch.randn(32, 3, 32, 32)


def transformer() -> tuple[Any, Any]:
    """Six encoder layers of 512 with an embedding, and a batch of 4 sequences of 64 tokens."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    net = torch.nn.Sequential(torch.nn.Embedding(2000, 512), encoder)
    return net, torch.randint(0, 2000, (4, 64))


_NETS: dict[str, Callable[[], tuple[Any, Any]]] = {
    _SMALL: small,
    _RESNET: resnet,
    _TRANSFORMER: transformer,
}


def measure(only: list[str], turns: int) -> dict[str, dict[str, list[float]]]:
    """Time the work on one rank; the ranks' ``main``. Returns seconds by work and backend."""
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("hvd", "gloo")}
    size = dist.get_world_size()

    def collective(kind: str, bytes_: int, group: Any) -> Callable[[], Any]:
        whole = torch.zeros(bytes_ // 4 // size * size)
        part = torch.zeros(len(whole) // size)
        return {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "all_to_all": lambda: dist.all_to_all_single(
                torch.empty_like(whole), whole, group=group
            ),
        }[kind]

    def step(wrapper: str, name: str, group: Any) -> Callable[[], Any]:
        torch.manual_seed(0)
        net, batch = _NETS[name]()
        if wrapper == "DDP":
            net = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
        else:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(group, "cpu")
            layers = getattr(net[1], "layers", []) if name == _TRANSFORMER else net.children()
            for layer in layers:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def once() -> None:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()

        return once

    works: dict[str, tuple[int, dict[str, Callable[[], Any]]]] = {}
    for kind in _COLLECTIVES:
        for name, bytes_ in _SIZES.items():
            count = max(3, min(200, 50_000_000 // bytes_))
            title = f"{kind}, {name}"
            if any(each in title for each in only):
                works[title] = count, {b: collective(kind, bytes_, g) for b, g in groups.items()}
    for wrapper in ("DDP", "FSDP2"):
        for name, count in _STEPS.items():
            title = f"{wrapper} step, {name}"
            if any(each in title for each in only):
                works[title] = count, {b: step(wrapper, name, g) for b, g in groups.items()}
    found: dict[str, dict[str, list[float]]] = {}
    for title, (count, systems) in works.items():
        seconds = found.setdefault(title, {system: [] for system in systems})
        more = _MORE_TURNS if title.endswith((_RESNET, _TRANSFORMER)) else 1
        for turn in range(turns * more + 1):
            for system in list(systems) if turn % 2 else list(systems)[::-1]:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    systems[system]()
                if turn:  # not timed: it makes buffers and connections
                    seconds[system].append((time.perf_counter() - start) / count)
    dist.destroy_process_group()
    return found


def main() -> None:
    """Measure, print a table, and write the raw data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of works")
    parser.add_argument("--np", type=int, default=-2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(report.machine())
    runner = HorovodRunner(np=options.np)
    found = runner.run(measure, only=options.only, turns=options.turns)
    assert runner.last_run is not None
    rows = []
    for work, systems in found.items():
        ours, theirs = median(systems["hvd"]), median(systems["gloo"])
        target = [f"{theirs / ours:.2f}", "-", "-"]
        if work in _TARGETS:
            target = report.at_least(f"gloo / hvd, {work}", theirs / ours, _TARGETS[work])
        rows.append([work, f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", *target])
    heads = ["milliseconds", f"hvd ({runner.last_run.controller})", "gloo", "ratio", "target", ""]
    print(f"\n{report.table(heads, rows)}")
    if options.json:
        report.write_json(options.json, {"seconds": found})


if __name__ == "__main__":
    main()
