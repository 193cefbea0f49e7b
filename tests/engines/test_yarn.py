"""Stories on a real YARN, with files on a real HDFS."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from horovod_runner import (
    HorovodRunner,
    Limits,
    RankFailedError,
    SlotError,
    load_checkpoint,
    save_checkpoint,
)
from horovod_runner.common.options import grouped
from horovod_runner.data import parquet
from tests.contract.test_end import Calling
from tests.engines.hadoop import ROOT, Hadoop
from tests.engines.programs import step_until_two_ranks_are_back, wait_in_the_first_attempt
from tests.places import classic_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("yarn"), pytest.mark.timeout(900)]


def settings(hadoop: Hadoop, **more: str) -> dict[str, str]:
    """The settings of an application with two executors of one slot each."""
    return {
        "spark.master": "yarn",
        "spark.submit.deployMode": "client",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.instances": "2",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "2g",
        "spark.yarn.am.memory": "256m",
        # They are on this machine already: nothing is uploaded.
        "spark.yarn.jars": f"local:{hadoop.environment['SPARK_HOME']}/jars/*",
        "spark.pyspark.python": sys.executable,
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        **{f"spark.{name.replace('_', '.')}": value for name, value in more.items()},
    }


@pytest.fixture(scope="module")
def session(hadoop: Hadoop) -> Iterator[SparkSession]:
    """An application in client mode. Tests with sessions of their own come before its first use."""
    with classic_session(settings(hadoop)) as session:
        yield session


def runner(session: SparkSession, **options: Any) -> HorovodRunner:
    given = {"np": 2, "spark": session, "preload_frameworks": False, "hang_timeout": 600}
    return HorovodRunner(**grouped({**given, **options}))


def add_ranks() -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.full((1_000_000,), hvd.rank() + 1.0), op=hvd.Sum)[0])


def test_executors_that_yarn_has_not_granted_yet_are_waited_for(hadoop: Hadoop) -> None:
    # Spark says at once that it is ready; without these settings, after 30 seconds.
    at_once = {
        "spark.scheduler.minRegisteredResourcesRatio": "0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "0s",
    }
    with classic_session({**settings(hadoop), **at_once}) as session:
        assert runner(session).run(add_ranks) == 3.0


def test_a_queue_that_is_too_small_is_named_with_its_limit(
    hadoop: Hadoop, capsys: pytest.CaptureFixture[str]
) -> None:
    with classic_session(
        settings(hadoop, yarn_queue="small", executor_memoryOverhead="1g")
    ) as session:
        with pytest.raises(SlotError) as caught:
            runner(session, limits=Limits(granted_executors=40, slot_notice=1)).run(add_ranks)
        told = str(caught.value)
        assert "np=2 asks for 2 slot(s) and yarn has 1 after" in told
        assert "spark.executor.instances=2" in told
        assert "1 of 2 executors run. YARN's queue root.small uses" in told
        assert "10% of the cluster (at most 20%). 1 container with" in told
        assert "waiting for slots: 1 of 2. 1 of 2 executors run." in capsys.readouterr().err
        # More executors than were asked for never come: nobody waits for them.
        with pytest.raises(SlotError, match=r"spark\.executor\.instances=2 with 1 slot"):
            runner(session, np=3, limits=Limits(granted_executors=3600)).run(add_ranks)


def test_a_run_gives_way_to_another_queue_and_resumes(hadoop: Hadoop) -> None:
    """Two executors of 6 GB borrow what belongs to the queue `urgent`, which asks for it."""
    large = settings(hadoop, executor_memoryOverhead="5g")
    applications: list[str] = []
    try:
        with classic_session(large) as session:

            def take_back(_: list[int]) -> None:
                applications.append(hadoop.submit("urgent", "sleep 3600", megabytes=7000))

            giving = Up(take_back)
            with contextlib.redirect_stdout(giving), pytest.raises(RankFailedError) as caught:
                runner(session).run(wait_in_the_first_attempt)
            assert "preempted" in str(caught.value)
            hadoop.kill_application(applications[0])
            again = runner(session, checkpoint_dir="hdfs:///preempted", max_restarts=1)

            def take_back_again(_: list[int]) -> None:
                applications.append(hadoop.submit("urgent", "sleep 20", megabytes=7000))

            with contextlib.redirect_stdout(Up(take_back_again)):
                assert again.run(wait_in_the_first_attempt) == (7, 2)
    finally:
        for application in applications:
            hadoop.kill_application(application)


def test_executors_of_dynamic_allocation_are_taken_and_their_loss_is_survived(
    hadoop: Hadoop,
) -> None:
    dynamic = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "0",
        "spark.dynamicAllocation.initialExecutors": "0",
        "spark.dynamicAllocation.maxExecutors": "2",
    }
    with classic_session({**settings(hadoop), **dynamic}) as session:
        with pytest.raises(SlotError, match=r"maxExecutors=2"):
            runner(session, np=(3, 4)).run(wait_in_the_first_attempt)
        killed: list[int] = []

        def kill(executors: list[int]) -> None:
            killed.append(executors[0])
            os.kill(executors[0], signal.SIGKILL)

        with contextlib.redirect_stdout(Up(kill)):
            again = runner(session, np=2, max_restarts=2, checkpoint_dir="hdfs:///dynamic")
            assert again.run(wait_in_the_first_attempt) == (7, 2)
        assert killed
        # Elastic ranks go on with the other one, and have two again.
        with contextlib.redirect_stdout(Up(kill)):
            elastic = runner(session, np=(1, 2), max_restarts=2, grow_after=0.0)
            sizes = elastic.run(step_until_two_ranks_are_back)
        assert sizes[0] == sizes[-1] == 2
        assert elastic.last_run.attempts[0].error


def test_rows_and_checkpoints_are_on_hdfs(session: SparkSession, hadoop: Hadoop) -> None:
    rows = f"{hadoop.url}/rows"
    session.range(1000).repartition(4).write.parquet(rows)
    found = runner(session, checkpoint_dir="hdfs:///checkpoints").run(
        read_and_save, frame=session.read.parquet(rows), files=parquet("hdfs:///rows")
    )
    assert found == [999 * 500.0, 999 * 500.0]
    resumed = runner(session, checkpoint_dir=f"{hadoop.url}/checkpoints", resume=True)
    assert resumed.run(read_saved) == {"sums": found}


def read_saved() -> Any:
    import horovod.torch as hvd

    hvd.init()
    loaded = load_checkpoint()
    return None if loaded is None else loaded.state


def read_and_save(frame: Any, files: Any) -> list[float]:
    """The sums of two datasets, each over all ranks; saves them, too."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    sums = []
    for shard in (frame, files):
        mine = sum(float(batch["id"].sum()) for batch in shard.batches(50))
        sums.append(float(hvd.allreduce(torch.tensor(mine, dtype=torch.float64), op=hvd.Sum)))
    save_checkpoint({"sums": sums}, 1)
    return sums


def test_an_exception_of_a_rank_comes_as_itself(session: SparkSession) -> None:
    def main() -> None:
        raise LookupError("no such class")

    with pytest.raises(LookupError, match="no such class"):
        runner(session).run(main)


class Up(Calling):
    """Calls a function with the process ids of the executors, by rank, when both ranks are up."""

    def __init__(self, function: Any) -> None:
        super().__init__("up", 2, lambda: function(self.executors))

    @property
    def executors(self) -> list[int]:
        return [int(line.split()[-2]) for line in sorted(self.getvalue().splitlines())]


def test_a_killed_executor_is_named_in_yarns_words(session: SparkSession) -> None:
    killing = Up(lambda executors: os.kill(executors[1], signal.SIGKILL))
    with (
        contextlib.redirect_stdout(killing),
        pytest.raises(RankFailedError, match=r"(?s)rank \d.*Exit status: 137"),
    ):
        runner(session).run(wait_in_the_first_attempt)


def test_a_run_resumes_from_hdfs_after_the_loss_of_an_executor(session: SparkSession) -> None:
    killing = Up(lambda executors: os.kill(executors[0], signal.SIGKILL))
    with contextlib.redirect_stdout(killing):
        again = runner(session, max_restarts=1, checkpoint_dir="hdfs:///killed")
        assert again.run(wait_in_the_first_attempt) == (7, 2)


def test_a_run_resumes_after_the_loss_of_a_node(session: SparkSession, hadoop: Hadoop) -> None:
    gone: list[str] = []

    def end_node(executors: list[int]) -> None:
        """End the NodeManager of an executor, with its containers."""
        (gone[:],) = [
            [name] for name in ("node1", "node2") if hadoop.daemons[name].has_started(executors[1])
        ]
        hadoop.daemons[gone[0]].close()

    try:
        with contextlib.redirect_stdout(Up(end_node)):
            again = runner(session, max_restarts=2, checkpoint_dir="hdfs:///node")
            weights, attempt = again.run(wait_in_the_first_attempt)
        assert weights == 7
        # With the node, YARN may have lost the application master, and then all executors.
        assert attempt > 1
    finally:
        for name in gone:
            hadoop.start_node(name)
            hadoop.daemons[name].await_start()


def take_all_memory() -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        taken = []
        # Slowly, because YARN measures twice a second; and not all that this machine has.
        while len(taken) < 80:
            taken.append(b"x" * 50_000_000)
            time.sleep(0.2)
    threading.Event().wait()


def test_a_container_above_its_memory_is_named_in_yarns_words(session: SparkSession) -> None:
    with pytest.raises(RankFailedError) as caught:
        runner(session).run(take_all_memory)
    told = str(caught.value)
    assert "rank 1" in told
    assert "exceeding physical memory limits" in told or "physical memory used" in told
    assert "spark.executor.memoryOverhead" in told
