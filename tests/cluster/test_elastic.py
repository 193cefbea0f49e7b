"""Executors of a standalone cluster that go and come in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
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
from tests.cluster.standalone import Place, StandaloneCluster
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


def test_under_dynamic_allocation_executors_come_for_a_run_and_go_after_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pyspark.sql import SparkSession
            from horovod_runner import HorovodRunner

            def main():
                import horovod.torch as hvd, torch
                hvd.init()
                return int(hvd.allreduce(torch.ones(1), op=hvd.Sum))

            def executors():
                return session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1

            builder = SparkSession.builder.master(sys.argv[1])
            for setting in sys.argv[2:]:
                builder = builder.config(*setting.split("="))
            session = builder.getOrCreate()
            before = executors()
            ranks = HorovodRunner(np=4).run(main)
            print("executors", before, "ranks", ranks, "executors", executors())
            while executors():
                time.sleep(0.1)
            print("none is left")
            session.stop()
            """
        )
    )
    dynamic = {
        "enabled": "true",
        "shuffleTracking.enabled": "true",
        "initialExecutors": "0",
        "executorIdleTimeout": "2s",
    }
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.cores": "2",
        "spark.executor.memory": "1g",
        **{f"spark.dynamicAllocation.{name}": value for name, value in dynamic.items()},
    }
    with StandaloneCluster(tmp_path, workers=(Place(), Place())) as cluster:
        done = subprocess.run(
            [
                sys.executable,
                str(script),
                cluster.master,
                *(f"{name}={value}" for name, value in settings.items()),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert "executors 0 ranks 4 executors 2" in done.stdout, done.stderr
    assert "none is left" in done.stdout
