"""Programs of ranks in containers; `horovod-runner run programs.py:NAME` starts one."""

from __future__ import annotations

import itertools

from horovod_runner import load_checkpoint, log_to_driver, save_checkpoint


def train_on() -> None:
    """Train without end, with a checkpoint after each step; or resume, and end after a step."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    found = load_checkpoint()
    first = found.step + 1 if found else 1
    weights = found.state["weights"] if found else torch.zeros(100_000)
    for step in itertools.count(first):
        weights += hvd.allreduce(torch.ones(100_000), op=hvd.Average)
        save_checkpoint({"weights": weights}, step)
        if hvd.rank() == 0:
            log_to_driver(f"step {step}, weight {weights[0]:.0f}")
        if found:
            return


def use_memory() -> None:
    """Let rank 1 use all memory that there is."""
    import horovod.torch as hvd
    import numpy as np

    hvd.init()
    used = []
    while hvd.rank() == 1:
        used.append(np.ones(10_000_000))
    hvd.barrier()
