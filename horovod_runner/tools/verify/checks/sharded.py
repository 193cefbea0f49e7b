"""FSDP2 (``fully_shard``) on the ranks' GPUs: parts of the weights, and the same losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from horovod_runner.tools.verify.check import VerifyCase, VerifyReading, check, equal, listed

_CLOSE: Final = 1e-3  # relative
_FEATURES: Final = 64
_ROWS: Final = 32  # of a rank


class Sharded(NamedTuple):
    """The results of a rank."""

    device: str  # the type of the device of its part of the weights
    part: int  # how many weights it holds
    weights: int  # how many there are
    losses: list[float]  # by step, averaged over the ranks
    expected: list[float]  # of a model that is not sharded, trained with all ranks' rows


@check("howto/gpu.md#other-libraries", 120)
def fsdp2(case: VerifyCase) -> Iterator[VerifyReading]:
    """FSDP2 shards a model over the ranks' GPUs, with the losses of the model in one piece."""
    results = case.runner(case.ranks()).run_all(train, steps=3 if case.quick else 20)
    yield from read_sharded(results, "cuda" if case.on_gpus() else "cpu")


def train(steps: int) -> Sharded:
    """Train both models with the same rows; the ranks' ``main``."""
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import mse_loss

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    # Starts CUDA on this rank's device: otherwise a device mesh chooses one by LOCAL_RANK.
    torch.zeros(1, device=device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()

    def build() -> torch.nn.Sequential:
        torch.manual_seed(0)
        inner = [torch.nn.Linear(_FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)]
        return torch.nn.Sequential(*inner, torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)

    plain, sharded = build(), build()
    weights = sum(weight.numel() for weight in plain.parameters())
    mesh = init_device_mesh(device.type, (size,))
    for layer in (*sharded, sharded):
        if isinstance(layer, torch.nn.Linear | torch.nn.Sequential):
            fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (plain, sharded)]
    losses: list[float] = []
    expected: list[float] = []
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(size * _ROWS, _FEATURES, generator=random).to(device)
        y = x.sum(1, keepdim=True) / 8
        own = slice(rank * _ROWS, (rank + 1) * _ROWS)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = mse_loss(plain(x), y)
        part = mse_loss(sharded(x[own]), y[own])
        loss.backward()
        part.backward()
        for optimizer in optimizers:
            optimizer.step()
        part = part.detach()
        torch.distributed.all_reduce(part)
        losses.append(float(part) / size)
        expected.append(loss.item())
    parts = [weight.to_local() for weight in sharded.parameters()]
    torch.distributed.destroy_process_group()
    held = sum(part.numel() for part in parts)
    return Sharded(parts[0].device.type, held, weights, losses, expected)


def read_sharded(results: Sequence[Sharded], device: str) -> list[VerifyReading]:
    """Compare the ranks' results with one unsharded model, and with the expected device."""
    first = results[0]
    parts = [each.part for each in results]
    apart = max(abs(a - b) / abs(b) for a, b in zip(first.losses, first.expected, strict=True))
    weights = f"weights of {len(results)} ranks, {listed(parts)}, in all"
    losses = f"losses of {len(first.losses)} steps, relative difference to a model in one piece"
    return [
        equal("device of the weights", {each.device for each in results}, {device}),
        equal(weights, sum(parts), first.weights),
        VerifyReading(losses, f"{apart:.1e}", f"at most {_CLOSE:g}", apart <= _CLOSE),
    ]
