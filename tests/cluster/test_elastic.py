"""Executors of a standalone cluster that go and come in the middle of a run."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import (
    commit,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    report,
)
from tests.cluster.standalone import Place, StandaloneCluster, executor
from tests.cluster.test_cluster import Killing
from tests.conftest import Ranks
from tests.programs import run

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
        log_to_driver(f"up {hvd.rank()} {executor().pid}")
    while len(state["done"]) < steps or (state["sizes"][-1] < 4 and current_attempt() < 5):
        step = len(state["done"])
        hvd.allreduce(torch.ones(1), name="step")
        state["done"].append(step)
        state["sizes"].append(hvd.size())
        report(step=step)
        commit(state, step + 1)
        time.sleep(0.02)  # the killed executor has to be noticed before all steps are done
    return {**state, "attempt": current_attempt()}


@pytest.mark.horovod
def test_no_commit_is_lost_when_an_executor_is_killed_and_comes_back(ranks: Ranks) -> None:
    runner = ranks.runner((2, 4), max_restarts=2, grow_after=0.0)
    with contextlib.redirect_stdout(Killing()) as shown:
        result = runner.run(add_up, steps=60)
    assert shown.killed
    # Every step was done once, although two ranks were lost and have come back.
    assert result["done"] == list(range(len(result["done"])))
    assert result["sizes"][0] == result["sizes"][-1] == 4
    attempts = runner.last_run.attempts
    assert "was lost" in attempts[0].error
    assert all(attempt.pause for attempt in attempts[1:])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A cluster without an application: those of the tests have settings of their own."""
    folder = tmp_path_factory.mktemp("cluster")
    with StandaloneCluster(folder, workers=(Place(), Place())) as started:
        yield started


def run_script(cluster: StandaloneCluster, folder: Path, script: str, **settings: str) -> str:
    """Run a script with an application of its own, the variable ``session``; returns its output."""
    path = folder / "script.py"
    chosen = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.cores": "2",
        "spark.executor.memory": "1g",
        **{f"spark.{name.replace('_', '.')}": value for name, value in settings.items()},
    }
    path.write_text(
        textwrap.dedent(
            f"""
            import os, signal, time
            import psutil
            from pyspark.sql import SparkSession
            from horovod_runner import ClusterConfig, HorovodRunner
            from horovod_runner import commit, load_checkpoint, log_to_driver
            from horovod_runner.sinks import Sink

            builder = SparkSession.builder.master({cluster.master!r})
            for name, value in {chosen!r}.items():
                builder = builder.config(name, value)
            session = builder.getOrCreate()

            def begin():  # the numbers of ranks of the steps that are committed
                import horovod.torch as hvd
                hvd.init()
                loaded = load_checkpoint()
                return [] if loaded is None else loaded.state["sizes"]

            def step(sizes):
                import horovod.torch as hvd, torch
                hvd.allreduce(torch.ones(1), name="step")
                sizes.append(hvd.size())
                commit({{"sizes": sizes}}, len(sizes))
                time.sleep(0.02)

            def executors():
                return session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
            """
        )
        + inspect.getsource(executor)
        + textwrap.dedent(script)
        + "session.stop()\n"
    )
    done = run(sys.executable, path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_under_dynamic_allocation_executors_come_for_a_run_and_go_after_it(
    cluster: StandaloneCluster, tmp_path: Path
) -> None:
    said = run_script(
        cluster,
        tmp_path,
        """
        def main():
            return int(os.environ["WORLD_SIZE"])

        before = executors()
        ranks = HorovodRunner(np=4).run(main)
        print("executors", before, "ranks", ranks, "executors", executors())
        while executors():
            time.sleep(0.1)
        print("none is left")
        """,
        dynamicAllocation_enabled="true",
        dynamicAllocation_shuffleTracking_enabled="true",
        dynamicAllocation_initialExecutors="0",
        dynamicAllocation_executorIdleTimeout="2s",
    )
    assert "executors 0 ranks 4 executors 2" in said
    assert "none is left" in said


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[StandaloneCluster]:
    """A cluster of two addresses: Spark starts no second copy of a task on the same host."""
    workers = [Place(address=f"127.0.0.{number}") for number in (2, 3)]
    with StandaloneCluster(tmp_path, workers=workers) as started:
        yield started


def test_spark_starts_no_second_copy_of_a_rank_that_is_slower_than_the_others(
    two_hosts: StandaloneCluster, tmp_path: Path
) -> None:
    said = run_script(
        two_hosts,
        tmp_path,
        """
        def copies():
            # Spark has no public function that counts them in Python. A copy may still be active.
            gateway, context = session.sparkContext._gateway, session.sparkContext._jsc.sc()
            context.listenerBus().waitUntilEmpty(60_000)
            none = gateway.jvm.java.util.ArrayList()
            no_numbers = gateway.new_array(gateway.jvm.double, 0)
            stages = context.statusStore().stageList(none, False, False, no_numbers, none)
            found = [stages.apply(number) for number in range(stages.size())]
            return sum(
                each.numActiveTasks() + each.numCompleteTasks() + each.numKilledTasks()
                + each.numFailedTasks() - each.numTasks()
                for each in found
            )

        begun = os.path.join(os.path.dirname(__file__), "begun")

        def wait_for_copy(numbers):
            from pyspark import TaskContext

            if 0 in numbers:
                if TaskContext.get().attemptNumber():
                    open(begun, "w").close()
                while not os.path.exists(begun):
                    time.sleep(0.05)

        start = time.monotonic()
        session.sparkContext.parallelize(range(4), 4).foreachPartition(wait_for_copy)
        seconds, others = time.monotonic() - start, copies()
        print("copies of another job:", others > 0)

        def main():
            if os.environ["HOROVOD_RANK"] == "0":
                time.sleep(2 * seconds)  # longer than that job took with its copy
            return int(os.environ["HOROVOD_SIZE"])

        for np in (4, (2, 4)):
            ranks = HorovodRunner(np=np, gpus_per_rank=0).run(main)
            print("ranks", ranks, "copies", copies() - others)
        """,
        speculation="true",
        speculation_interval="50ms",
        speculation_multiplier="1.1",
        speculation_quantile="0.1",
        speculation_minTaskRuntime="50ms",
    )
    assert said.count("ranks 4 copies 0") == 2, said
    assert "copies of another job: True" in said


def test_no_step_is_lost_when_an_executor_is_decommissioned(
    cluster: StandaloneCluster, tmp_path: Path
) -> None:
    said = run_script(
        cluster,
        tmp_path,
        """
        def main():
            sizes = begin()
            if not sizes:
                log_to_driver(str(executor().pid))
            while not sizes or sizes[-1] == 4 or len(sizes) < 20:
                step(sizes)
            return sizes

        class Decommission(Sink):
            told = 0

            def log(self, rank, text):
                self.told += 1
                if self.told == 4:
                    os.kill(int(text), signal.SIGPWR)

        while executors() < 2:
            time.sleep(0.1)
        cluster = ClusterConfig(slot_timeout=120, preload_frameworks=["horovod.torch"])
        sinks = [Decommission()]
        runner = HorovodRunner(np=(2, 4), grow_after=600, cluster_config=cluster, sinks=sinks)
        sizes = runner.run(main)
        print("sizes", sorted(set(sizes)), "sorted", sizes == sorted(sizes, reverse=True))
        for attempt in runner.last_run.attempts:
            print("attempt", attempt.size, attempt.change or attempt.error or "finished")
        """,
        decommission_enabled="true",
    )
    # Without max_restarts the run would have ended if a rank had been lost.
    assert "sizes [2, 4] sorted True" in said
    assert "attempt 4 from 4 to 2 ranks" in said
    assert "attempt 2 finished" in said


def test_a_run_goes_on_where_spark_excludes_what_has_failed(
    cluster: StandaloneCluster, tmp_path: Path
) -> None:
    said = run_script(
        cluster,
        tmp_path,
        """
        def main():
            sizes = begin()
            while len(sizes) < 20 or sizes[-1] < 4:
                step(sizes)
                if len(sizes) == 10 and os.environ["RANK"] == "0":
                    executor().kill()
            return sizes

        while executors() < 2:
            time.sleep(0.1)
        cluster = ClusterConfig(slot_timeout=120, preload_frameworks=["horovod.torch"])
        runner = HorovodRunner(np=(2, 4), max_restarts=3, grow_after=0, cluster_config=cluster)
        sizes = runner.run(main)
        print("from", sizes[0], "to", sizes[-1], [bool(a.error) for a in runner.last_run.attempts])
        """,
        excludeOnFailure_enabled="true",
        excludeOnFailure_task_maxTaskAttemptsPerExecutor="1",
        excludeOnFailure_application_maxFailedTasksPerExecutor="1",
    )
    # Depending on how soon the new executor comes, the second attempt has two or four ranks.
    assert re.search(r"from 4 to 4 \[True, (False, )?False\]", said)
