"""Trainings with sharded checkpoints; they run in the ranks of test_sharded."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

from horovod_runner import current_attempt, load_checkpoint, save_checkpoint
from horovod_runner.worker import context


def network() -> Any:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    return torch.nn.Sequential(*layers)


def rows() -> Any:
    import torch

    return torch.randn(12, 5, generator=torch.Generator().manual_seed(3))


def in_one_process(steps: int) -> dict[str, Any]:
    """The weights after the same training, in a single process."""
    import torch

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(rows()) - 1).square().mean().backward()
        optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def with_fsdp(steps: int, stop: int = 0) -> list[Any]:
    """Train with FSDP2 on the same rows with any number of ranks, and save every step.

    Returns:
        The first step, the epoch that was loaded, and the weights at the end.
    """
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def state_of(epoch: int = 0) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        more = {"epoch": epoch, "pair": (1, "two"), "array": np.arange(epoch), "empty": {}}
        return {"model": weights, "optimizer": moments, **more}

    first, epoch = 1, 0
    loaded = load_checkpoint(into=state_of)
    if loaded is not None:
        state = loaded.state
        epoch = state["epoch"]
        assert state["array"].tolist() == list(range(loaded.step))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        first = loaded.step + 1
    for step in range(first, steps + 1):
        optimizer.zero_grad()
        (model(rows()) - 1).square().mean().backward()
        optimizer.step()
        save_checkpoint(state_of(step), step, {"loss": abs(step - 2)}, sharded=True)
        if step == stop and current_attempt() == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [first, epoch, {name: value.numpy() for name, value in whole.items()}]


def into_shards() -> list[Any]:
    """Load a whole checkpoint into a sharded model."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model: Any = torch.nn.Linear(5, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"model": get_model_state_dict(model), "epoch": 0}
    loaded = load_checkpoint(into=state)
    assert loaded is not None
    return [loaded.step, state["epoch"], model.weight.full_tensor().detach().numpy()]


def plain_state(step: int) -> dict[str, Any]:
    """A state of DistributedDataParallel or Horovod: the same on all ranks."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(400, 50), torch.nn.Linear(50, 10))
    for weight in model.parameters():
        torch.nn.init.constant_(weight, step)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def with_horovod(steps: int) -> Any:
    """Save states of a training with Horovod, without torch.distributed; or load the latest."""
    import horovod.torch as hvd

    hvd.init()
    into = plain_state(9) if hvd.rank() else {}  # rank 0 reads nothing
    loaded = load_checkpoint(into=into)
    if loaded is not None:
        weights = [float(into["model"]["0.weight"].min())] if into else []
        return hvd.allgather_object([loaded.step, weights])
    for step in range(1, steps + 1):
        save_checkpoint(plain_state(step), step, sharded=True)
    return None


def with_full_disk() -> str:
    """On rank 1, large files cannot be written in step 2, and in step 4 nothing can be copied."""
    import horovod.torch as hvd

    hvd.init()
    failed = []
    for step in (1, 2, 3, 4, 5):
        rank = context.current()
        if rank is not None and rank.saver is not None:
            rank.saver.finish()
        if hvd.rank() == 1:
            limit = 20_000 if step == 2 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        state = plain_state(step)
        if step == 4 and hvd.rank() == 1:
            state["model"] = {name: value.to("meta") for name, value in state["model"].items()}
        try:
            save_checkpoint(state, step, sharded=True)
        except NotImplementedError:
            failed.append(step)
    return f"done, {hvd.allgather_object(failed)}"


def killed_while_writing(folder: str) -> Any:
    """Rank 1 is killed while it writes a large part of the second checkpoint."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    if loaded is not None:
        left = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        return hvd.allgather_object([loaded.step, left])
    large = {str(part): torch.zeros(30_000_000) for part in range(2)}
    save_checkpoint({"x": torch.ones(3)}, 1, sharded=True)
    save_checkpoint(large, 2, sharded=True)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()
    return None


def refused() -> list[str]:
    """Calls that are refused before anything is written."""
    import horovod.torch as hvd

    errors = []

    def attempt(state: Any, step: int) -> None:
        try:
            save_checkpoint(state, step, sharded=True)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    attempt({"x": 1}, 1)
    hvd.init()
    attempt({"x": print}, 1)
    attempt(b"x", 1)
    attempt({"x": 1}, 1 + hvd.rank())
    return errors
