"""Programs that drivers in pods run: ``programs.py NAME``."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from horovod_runner import (
    ClusterConfig,
    HorovodRunner,
    SlotError,
    commit,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    save_checkpoint,
)

SLOTS = ClusterConfig(slot_timeout=300, preload_frameworks=False)


def wait_in_the_first_attempt() -> tuple[int, int]:
    """Save a checkpoint and wait for the end of a pod; the next attempt returns what it has."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    if loaded is None:
        save_checkpoint({"weights": 7}, 1)
        save_checkpoint({"weights": 7}, 2)  # waits until the first one is complete
        hvd.allreduce(torch.ones(1), name="saved")
        log_to_driver(f"up {os.uname().nodename}")
        threading.Event().wait()
        raise AssertionError("the wait has no end")
    return loaded.state["weights"], current_attempt()


def step_until_a_pod_has_come_back() -> list[int]:
    """Commit each step; returns the number of ranks of each."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    state: dict[str, Any] = {"sizes": []} if loaded is None else loaded.state
    sizes: list[int] = state["sizes"]
    if not sizes:
        log_to_driver(f"up {os.uname().nodename}")
    while True:
        hvd.allreduce(torch.ones(1), name="step")
        sizes.append(hvd.size())
        commit(state, len(sizes))
        if current_attempt() > 1 and hvd.size() == 2:
            return sizes
        time.sleep(0.1)  # a pod has to end and to come before all memory is full of steps


def resume() -> None:
    """Save to a store, lose a pod, resume from the store."""
    import s3fs

    s3fs.S3FileSystem().mkdir("mine")
    runner = HorovodRunner(
        np=2, max_restarts=2, checkpoint_dir="s3://mine/run", cluster_config=SLOTS
    )
    print("resumed", runner.run(wait_in_the_first_attempt))


def grow() -> None:
    """Lose a pod of an elastic run and get another one."""
    runner = HorovodRunner(np=(1, 2), max_restarts=3, grow_after=0.0, cluster_config=SLOTS)
    sizes = runner.run(step_until_a_pod_has_come_back)
    attempts = runner.last_run.attempts
    print("ranks: from", sizes[0], "to", sizes[-1], "in", len(attempts), "attempts")
    print("ends:", "; ".join(each.change or each.error or "finished" for each in attempts))


def count() -> None:
    """Run on the session that the settings describe, as a notebook does."""
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate():
        print("ranks", HorovodRunner(np=2, cluster_config=SLOTS).run(_size))


def refused() -> None:
    """Ask for more than the cluster has."""
    try:
        HorovodRunner(np=2, cluster_config=ClusterConfig(slot_timeout=20)).run(_size)
    except SlotError as error:
        print("refused:", " ".join(str(error).split()))


def _size() -> str:
    return os.environ["WORLD_SIZE"]


if __name__ == "__main__":
    # Functions of __main__ travel by value, as those of a user's script do.
    {"resume": resume, "grow": grow, "count": count, "refused": refused}[sys.argv[1]]()
