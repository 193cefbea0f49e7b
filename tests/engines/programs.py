"""What ranks do on all engines; `horovod-runner run programs.py:NAME` starts one in a container."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

from horovod_runner import commit, current_attempt, load_checkpoint, log_to_driver, save_checkpoint


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


def _say_up() -> None:
    """Tell the driver the process of the executor, and the name of its host."""
    import psutil

    # The nearest Java: YARN's NodeManager is another one.
    executor = next(each.pid for each in psutil.Process().parents() if each.name() == "java")
    log_to_driver(f"up {executor} {os.uname().nodename}")


def wait_in_the_first_attempt() -> tuple[int, int]:
    """Save a checkpoint and wait for an end; the next attempt returns what it has."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    if loaded is not None:
        return loaded.state["weights"], current_attempt()
    save_checkpoint({"weights": 7}, 1)
    save_checkpoint({"weights": 7}, 2)  # waits until the first one is complete
    hvd.allreduce(torch.ones(1), name="saved")
    _say_up()
    threading.Event().wait()
    raise AssertionError("the wait has no end")


def step_until_two_ranks_are_back() -> list[int]:
    """Commit each step, until a lost rank is back; returns the number of ranks of each step."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    state: dict[str, Any] = {"sizes": []} if loaded is None else loaded.state
    sizes: list[int] = state["sizes"]
    if not sizes:
        _say_up()
    while True:
        hvd.allreduce(torch.ones(1), name="step")
        sizes.append(hvd.size())
        commit(state, len(sizes))
        if current_attempt() > 1 and hvd.size() == 2:
            return sizes
        time.sleep(0.1)  # an executor has to end and to come before all memory is full of steps
