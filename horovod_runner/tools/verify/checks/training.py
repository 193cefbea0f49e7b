"""ResNet-50: Horovod against plain PyTorch with one rank, and against DDP with several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any, Final, NamedTuple

from horovod_runner.results.page.numbers import duration
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal, speed
from horovod_runner.tools.verify.checks.timing import take_turns

_LEAST: Final = {"plain PyTorch": 0.95, "DDP": 0.85}
_CLOSE: Final = 0.02  # relative; convolutions on GPUs do not sum in a fixed order
_LATER: Final = 5  # a step; after many, the order of the sums matters more and more


class TrainingSize(NamedTuple):
    """How much to train: the network, a batch, and the steps in each system's turns."""

    width: int
    batch: int
    side: int
    steps: int
    turns: int


_FULL: Final = TrainingSize(64, 32, 224, 10, 6)
_QUICK: Final = TrainingSize(8, 2, 32, 1, 2)


class TrainedRank(NamedTuple):
    """The measurements of a rank."""

    seconds: dict[str, float]  # the median seconds of a step, by system
    losses: dict[str, tuple[float, float]]  # of the first and a later step, by system
    spread: float  # by how much the weights of the Horovod model differ between ranks, at most


@check("howto/gpu.md#how-fast", 180)
def resnet50(case: VerifyCase) -> Iterator[VerifyReading]:
    """With one rank, ResNet-50 trains as fast as with plain PyTorch, with the same losses."""
    yield from _compare(case, 1, "plain PyTorch")


@check("howto/gpu.md#how-fast", 180, Needs(several=True))
def resnet50_all(case: VerifyCase) -> Iterator[VerifyReading]:
    """With a rank per GPU, ResNet-50 trains about as fast as with DDP, and weights stay equal."""
    yield from _compare(case, case.ranks(), "DDP")


def _compare(case: VerifyCase, ranks: int, peer: str) -> list[VerifyReading]:
    size = _QUICK if case.quick or not case.on_gpus() else _FULL
    results = case.runner(ranks).run_all(train, size=size, peer=peer)
    return read_training(results, size, peer, judge=case.judges_speed)


def train(size: TrainingSize, peer: str) -> TrainedRank:
    """Train ResNet-50 in turns with Horovod and "plain PyTorch" or "DDP"; the ranks' ``main``."""
    import horovod.torch as hvd
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    from horovod_runner.tools.verify.checks.resnet50 import resnet50

    hvd.init()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.zeros(1, device=device)  # the current device is set when CUDA starts
    if not on_gpu:
        torch.set_num_threads(1)  # sizes are tiny there
    if peer == "DDP":
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")

    random = torch.Generator().manual_seed(hvd.rank())
    images = torch.randn(size.batch, 3, size.side, size.side, generator=random).to(device)
    labels = torch.randint(1000, [size.batch], generator=random).to(device)
    losses: dict[str, list[Any]] = {"Horovod": [], peer: []}
    nets: dict[str, Any] = {}

    def prepare(system: str) -> Callable[[], None]:
        net: Any = resnet50(size.width).to(device)
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
        if system == "Horovod":
            hvd.broadcast_parameters(net.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        elif system == "DDP":
            net = DistributedDataParallel(net)
        nets[system] = net

        def step() -> None:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses[system].append(loss.detach())

        return step

    steps = {system: prepare(system) for system in losses}
    seconds = take_turns(steps, size.turns, size.steps)
    weights = torch.cat([w.detach().flatten() for w in nets["Horovod"].parameters()])
    most, least = (hvd.allreduce(weights, op=op) for op in (hvd.Max, hvd.Min))
    if peer == "DDP":
        torch.distributed.destroy_process_group()
    return TrainedRank(
        seconds,
        {system: (float(each[0]), float(each[:_LATER][-1])) for system, each in losses.items()},
        float((most - least).max()),
    )


def read_training(
    results: Sequence[TrainedRank], size: TrainingSize, peer: str, *, judge: bool
) -> list[VerifyReading]:
    """Judge the ranks' measurements."""
    ranks = len(results)
    seconds = {name: mean(each.seconds[name] for each in results) for name in ("Horovod", peer)}
    figures = "; ".join(
        f"{name} {ranks * size.batch / s:,.4g} images/s, {duration(s)} a step"
        for name, s in seconds.items()
    )
    name = f"images/s of {ranks} rank{'s' if ranks > 1 else ''}, Horovod / {peer}"
    readings = [speed(name, seconds[peer] / seconds["Horovod"], _LEAST[peer], figures, judge=judge)]
    for number, step in enumerate((1, min(_LATER, size.steps * size.turns))):
        ours, theirs = (mean(r.losses[s][number] for r in results) for s in ("Horovod", peer))
        near = abs(ours - theirs) <= _CLOSE * abs(theirs)
        readings.append(VerifyReading(f"loss of step {step}", f"{ours:.4f}", f"{theirs:.4f}", near))
    spread = max(each.spread for each in results)
    readings.append(equal("difference between the ranks' weights", f"{spread:g}", "0"))
    return readings
