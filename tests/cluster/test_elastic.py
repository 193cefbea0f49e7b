"""Executors of a standalone cluster that go and come in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from horovod_runner import (
    ClusterConfig,
    HorovodRunner,
    commit,
    current_attempt,
    load_checkpoint,
    log_to_driver,
)
from tests.cluster.test_cluster import Killing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.places("cluster"),
    pytest.mark.usefixtures("nothing_left"),
]


def add_up(steps: int) -> dict[str, Any]:
    """Add up the ranks' numbers, with a commit at each step, until four ranks have come back."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    state = {"done": [], "sizes": []} if loaded is None else loaded.state
    if loaded is None:
        log_to_driver(f"up {hvd.rank()} {os.getcwd()}")
    while len(state["done"]) < steps or (state["sizes"][-1] < 4 and current_attempt() < 5):
        step = len(state["done"])
        hvd.allreduce(torch.ones(1), name="step")
        state["done"].append(step)
        state["sizes"].append(hvd.size())
        commit(state, step + 1)
        time.sleep(0.02)  # the killed executor has to be noticed before all steps are done
    return {**state, "attempt": current_attempt()}


def test_a_run_shrinks_when_an_executor_is_killed_and_grows_when_it_comes_back(
    spark: SparkSession,
) -> None:
    runner = HorovodRunner(
        np=(2, 4),
        max_restarts=2,
        grow_after=0.0,
        gpus_per_rank=0,
        cluster_config=ClusterConfig(spark=spark),
    )
    with contextlib.redirect_stdout(Killing()) as shown:
        result = runner.run(add_up, steps=60)
    assert shown.killed
    # Every step was done once, although four ranks became two and four again.
    assert result["done"] == list(range(len(result["done"])))
    sizes = [size for at, size in enumerate(result["sizes"]) if result["sizes"][at - 1] != size]
    assert result["sizes"][0] == 4
    assert 2 in result["sizes"]
    assert result["sizes"][-1] == 4, sizes
    attempts = runner.last_run.attempts
    assert attempts[0].error
    assert any(attempt.change.endswith("to 4 ranks") for attempt in attempts)
    assert all(attempt.pause for attempt in attempts[1:])
