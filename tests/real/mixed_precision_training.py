"""Trainings with a gradient scaler or clipped gradients: with Horovod, and with torch's DDP.

They run in the ranks; test_mixed_precision compares the results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

from tests.errors import error_of

STEPS, INFINITE, MOST = 5, 2, 0.05
kept: list[Any] = []


def plain(scaler: Any, optimizer: Any, _model: Any) -> None:
    scaler.step(optimizer)


def clipped(scaler: Any, optimizer: Any, model: Any) -> None:
    import torch

    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
    scaler.step(optimizer)


def by_value(_scaler: Any, optimizer: Any, model: Any) -> None:
    import torch

    torch.nn.utils.clip_grad_value_(iter(list(model.parameters())), MOST)
    optimizer.step()


def by_total_norm(_scaler: Any, optimizer: Any, model: Any) -> None:
    import torch

    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, MOST, norm)
    optimizer.step()


def documented(scaler: Any, optimizer: Any, model: Any) -> None:
    """What Horovod's documentation shows; with a plain optimizer, what torch's shows."""
    import torch

    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
    with optimizer.skip_synchronize() if hasattr(optimizer, "synchronize") else nullcontext():
        scaler.step(optimizer)


class Case(NamedTuple):
    """A way to train.

    Attributes:
        step: what is done after the last ``backward`` of a step.
        scaled: whether the scaler is enabled; one rank's gradients overflow in a step then.
        passes: how many times ``backward`` is called for a step.
        width: of the hidden layer.
        fused: whether the optimizer is fused.
        alone: whether each rank trains for itself, in a process set of its own.
        options: of Horovod's optimizer.
    """

    step: Callable[..., None] = plain
    scaled: bool = True
    passes: int = 1
    width: int = 8
    fused: bool = False
    alone: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


CASES = {
    "plain": Case(),
    "clipped": Case(clipped),
    "as Horovod documents it": Case(documented),
    # A second reduction would change a sum, but not an average.
    "sum": Case(clipped, options={"op": "Sum"}),
    "accumulated": Case(clipped, passes=2, options={"backward_passes_per_step": 2, "op": "Sum"}),
    "groups": Case(clipped, options={"groups": 2, "op": "Sum"}),
    "gradients that are sent in backward": Case(clipped, width=1 << 18, options={"op": "Sum"}),
    "fused": Case(fused=True),
    "process sets": Case(clipped, alone=True),
    "clipped without a scaler": Case(clipped, scaled=False, options={"op": "Sum"}),
    "clipped by value": Case(by_value, scaled=False, options={"op": "Sum"}),
    "clipped by a total norm": Case(by_total_norm, scaled=False, options={"op": "Sum"}),
}


def compare_all() -> dict[str, Any]:
    """Each case with Horovod and with DDP: the largest difference of weights, and the scales."""
    import horovod.torch as hvd
    import torch.distributed as dist

    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    dist.init_process_group("gloo")
    return {name: compare(case, sets[hvd.rank()]) for name, case in CASES.items()}


def compare(case: Case, own_set: Any) -> dict[str, Any]:
    import horovod.torch as hvd
    import torch

    size = 1 if case.alone else hvd.size()
    model = network(case.width)
    options = dict(case.options)
    op = getattr(hvd, options.pop("op", "Average"))
    if case.alone:
        options["process_set"] = own_set
    optimizer = hvd.DistributedOptimizer(
        new_optimizer(model, case), named_parameters=model.named_parameters(), op=op, **options
    )
    ours, scales = train(case, model, optimizer, 1 / size if op == hvd.Sum else 1.0)
    model = network(case.width)
    wrapped = model if case.alone else torch.nn.parallel.DistributedDataParallel(model)
    # Freed while the group's thread ends its last reduction, torch 2.13 waits for ever.
    kept.append(wrapped)
    theirs, their_scales = train(case, wrapped, new_optimizer(model, case), 1.0)
    differences = [
        float((one - other).abs().max())
        for step, other_step in zip(ours, theirs, strict=True)
        for one, other in zip(step, other_step, strict=True)
    ]
    moved = [bool((after[0] != before[0]).any()) for before, after in pairwise(ours)]
    return {
        "difference": max(differences),
        "scales": scales,
        "their scales": their_scales,
        "moved": [True, *moved],
    }


def network(width: int) -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    )


def new_optimizer(model: Any, case: Case) -> Any:
    import torch

    if case.fused:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(case: Case, model: Any, optimizer: Any, factor: float) -> tuple[list[Any], list[float]]:
    """Train; returns the weights and the scale after each step.

    Args:
        case: how.
        model: the network.
        optimizer: a plain one, or Horovod's.
        factor: of the loss.
    """
    import horovod.torch as hvd
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaled)
    weights, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.passes):
            random = torch.Generator().manual_seed(100 * hvd.rank() + 10 * step + part)
            x = torch.randn(6, 4, generator=random)
            loss = (model(x) - 1).square().mean() * factor / case.passes
            if case.scaled and step == INFINITE and hvd.rank() == 1:
                loss = loss * 1e38  # its gradients overflow
            scaler.scale(loss).backward()
        case.step(scaler, optimizer, model)
        scaler.update()
        weights.append([p.detach().clone() for p in model.parameters()])
        scales.append(scaler.get_scale())
    return weights, scales


def errors() -> list[str]:
    """What is refused."""
    import horovod.torch as hvd
    import torch

    model = network(2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
    )
    scaler = torch.amp.GradScaler("cpu")
    return [error_of(ValueError, call, optimizer) for call in (scaler.unscale_, scaler.step)]


def without_gradients() -> list[list[float]]:
    """After a step that all skip, rank 1 computes no gradient; the weights after each step."""
    import horovod.torch as hvd
    import torch

    model = network(2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights = []
    for factor in (1e38, 1.0, 1.0):
        model.zero_grad()
        loss = scaler.scale(model(torch.ones(1, 4)).square().sum() * factor)
        if factor > 1 or hvd.rank() == 0:
            loss.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        weights.append([float(p.detach().sum()) for p in model.parameters()])
    return weights


def clip_norm(parameters: list[Any]) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_(parameters, max_norm=MOST)


def clip_layers(parameters: list[Any]) -> None:
    clip_norm(parameters[:2])
    clip_norm(parameters[2:])


def clip_value(parameters: list[Any]) -> None:
    import torch

    torch.nn.utils.clip_grad_value_(parameters, MOST / 10)


def left_out(clip: Callable[[list[Any]], None], passes: int, every: bool) -> list[list[Any]]:
    """Train where a rank leaves ``backward`` out; the weights after each step.

    Args:
        clip: clips the gradients of some parameters.
        passes: ``backward`` is called so many times for a step, on rank 1 once less.
        every: whether to clip after each of them, or after the last one.
    """
    import horovod.torch as hvd
    import torch

    model = network(8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
    )
    parameters = list(model.parameters())
    weights = []
    for step in range(STEPS):
        for part in range(passes):
            random = torch.Generator().manual_seed(100 * hvd.rank() + 10 * step + part)
            loss = (model(torch.randn(6, 4, generator=random)) - 1).square().mean()
            if hvd.rank() == 0 or part > 0:
                loss.backward()
            if every or part == passes - 1:
                clip(parameters)
        optimizer.step()
        if hvd.rank() == 0:
            clip_norm(parameters)  # as to print a norm: the other rank does not take part
        model.zero_grad()
        weights.append([p.detach().clone() for p in parameters])
    return weights


LEFT_OUT = {
    f"{clip.__name__}, {passes}, {every}": (clip, passes, every)
    for clip in (clip_norm, clip_layers, clip_value)
    for passes, every in ((1, False), (2, False), (2, True))
}


def main() -> Any:
    """All of them, and the results of all ranks."""
    import horovod.torch as hvd

    found = compare_all(), errors(), without_gradients()
    skipped = {name: left_out(*case) for name, case in LEFT_OUT.items()}
    return hvd.allgather_object((*found, skipped))
