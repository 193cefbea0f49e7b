"""Stories on a real YARN, with files on a real HDFS."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from horovod_runner import (
    ClusterConfig,
    HorovodRunner,
    Limits,
    SlotError,
)
from tests.engines import hadoop as engine
from tests.engines.hadoop import ROOT, Hadoop
from tests.places import classic_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("yarn"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hadoop() -> Iterator[Hadoop]:
    """The daemons; this process uses them."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            with engine.running() as hadoop:
                for name, value in hadoop.environment.items():
                    patch.setenv(name, value)
                yield hadoop
        except engine.EngineError as error:
            pytest.exit(str(error), returncode=1)


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
    """An application in client mode."""
    with classic_session(settings(hadoop)) as session:
        yield session


def runner(session: SparkSession, **options: Any) -> HorovodRunner:
    cluster = ClusterConfig(
        spark=session, preload_frameworks=False, limits=options.pop("limits", Limits())
    )
    return HorovodRunner(**{"np": 2, "cluster_config": cluster, "hang_timeout": 600, **options})


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
    with classic_session(settings(hadoop, yarn_queue="small")) as session:
        with pytest.raises(SlotError) as caught:
            runner(session, limits=Limits(granted_executors=15, slot_notice=1)).run(add_ranks)
        told = str(caught.value)
        assert "np=2 asks for 2 slot(s) and yarn has 1 after 15 s" in told
        assert "spark.executor.instances=2" in told
        assert "1 of 2 executors run. YARN's queue root.small uses" in told
        assert "10% of the cluster (at most 20%)" in told
        assert "waiting for slots: 1 of 2. 1 of 2 executors run." in capsys.readouterr().err
        # More executors than were asked for never come: nobody waits for them.
        with pytest.raises(SlotError, match=r"spark\.executor\.instances=2 with 1 slot"):
            runner(session, np=3, limits=Limits(granted_executors=3600)).run(add_ranks)
