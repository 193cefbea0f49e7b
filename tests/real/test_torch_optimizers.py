"""Horovod's functions for torch's optimizers: Muon, Adasum, a state that one rank has loaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.options import grouped

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("torch optimizers"),
]
NAMES = ["Muon", "AdamW", "SGD", "Adam"]


@cache
def results() -> list[dict[str, Any]]:
    """The results of every rank, of one run."""
    options = grouped({"preload_frameworks": ["horovod.torch"], "cpu_collectives": "gloo"})
    runner = HorovodRunner(np=-2, **options)
    return list(runner.run(all_optimizers))


def all_optimizers() -> list[dict[str, Any]]:
    import horovod.torch as hvd

    hvd.init()
    loaded = {name: state_of_one_rank(name) for name in NAMES}
    trained = {"muon": muon(), "one": muon(size=1)}
    return list(hvd.allgather_object({"loaded": loaded, "adasum": adasum(), **trained}))


def new(name: str, parameters: Any) -> Any:
    import torch

    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=0.1, **options)


def state_of_one_rank(name: str) -> dict[str, Any]:
    """Broadcast the state of rank 0's optimizer to a rank whose optimizer is new."""
    import horovod.torch as hvd
    import torch

    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = new(name, model.parameters())
    if hvd.rank() == 0:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    gradient = model.weight.grad
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    (state,) = optimizer.state_dict()["state"].values()
    return {
        "unchanged": bool((model.weight == before).all()),
        "weights": model.weight.tolist(),
        "state": {key: torch.as_tensor(value).tolist() for key, value in state.items()},
        "same gradient": gradient is None or gradient is model.weight.grad,
        "has gradient": model.weight.grad is not None,
    }


def adasum() -> str:
    """The error of a reduction that needs MPI."""
    import horovod.torch as hvd
    import torch

    try:
        return str(hvd.allreduce(torch.ones(3), op=hvd.Adasum))
    except ValueError as error:
        return str(error)


def muon(size: int | None = None) -> list[Any]:
    """Train the matrices with Muon and the other weights with AdamW.

    Args:
        size: 1 trains on the batches of all ranks, without Horovod.

    Returns:
        The weights.
    """
    import horovod.torch as hvd
    import torch

    rank, size = (hvd.rank(), hvd.size()) if size is None else (0, size)
    torch.manual_seed(7 if size == 1 else 7 + rank)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    named = list(model.named_parameters())
    matrices = [(name, weight) for name, weight in named if weight.ndim == 2]
    others = [(name, weight) for name, weight in named if weight.ndim != 2]
    optimizers = [
        new(kind, [weight for _, weight in part])
        for kind, part in (("Muon", matrices), ("AdamW", others))
    ]
    if size > 1:
        optimizers = [
            hvd.DistributedOptimizer(optimizer, named_parameters=part)
            for optimizer, part in zip(optimizers, (matrices, others), strict=True)
        ]
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
    for batch in x.split(12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        part = batch.chunk(size)[rank]
        ((model(part) - part.sum(1, keepdim=True)) ** 2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [weight.tolist() for weight in model.state_dict().values()]


@pytest.mark.parametrize("name", NAMES)
def test_broadcast_optimizer_state_leaves_the_weights_as_they_are(name: str) -> None:
    first, second = (rank["loaded"][name] for rank in results())
    assert first["unchanged"]
    assert second["unchanged"]
    assert first["weights"] == second["weights"]
    assert first["state"] == second["state"]
    assert first["same gradient"]
    assert second["has gradient"]  # of 0, as Horovod leaves it


def test_muon_trains_matrices_beside_another_optimizer() -> None:
    first, second = results()
    assert first["muon"] == second["muon"]
    for ours, one in zip(first["muon"], first["one"], strict=True):
        for row, expected in zip(ours, one, strict=True):
            assert row == pytest.approx(expected, abs=2e-2)  # Muon computes in bfloat16


def test_adasum_without_mpi_names_the_setting() -> None:
    for rank in results():
        assert 'set ClusterConfig(cpu_collectives="mpi")' in rank["adasum"]
