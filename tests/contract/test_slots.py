"""Spark's slots are counted before the launch; an error says what is missing."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import pytest

from horovod_runner import CancelledError, ClusterConfig, HorovodRunner, Limits, SlotError
from tests.conftest import Ranks
from tests.contract.test_end import Calling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("spark", "cluster", "connect")]


def test_more_ranks_than_slots_are_refused_at_once(spark: SparkSession) -> None:
    started = _active_jobs(spark)
    with pytest.raises(SlotError, match=r"np=5 .* has 4\.") as caught:
        HorovodRunner(np=5, cluster_config=ClusterConfig(spark=spark, slot_timeout=0)).run(print)
    assert "spark.task.cpus=1" in str(caught.value)
    assert _active_jobs(spark) == started


def _active_jobs(spark: SparkSession) -> list[int]:
    try:
        tracker = spark.sparkContext.statusTracker()
    except Exception:
        return []  # Spark Connect has no such function
    return list(tracker.getActiveJobsIds())


def test_the_wait_for_slots_is_announced_and_limited(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterConfig(spark=spark, slot_timeout=8, limits=Limits(slot_notice=0.001))
    with pytest.raises(SlotError):
        HorovodRunner(np=5, cluster_config=cluster).run(print)
    assert "waiting for slots: 4 of 5" in capsys.readouterr().err


@pytest.mark.places("cluster")
def test_the_first_executors_have_their_time_also_where_the_driver_joined_late(
    spark: SparkSession, ranks: Ranks
) -> None:
    runner = ranks.runner(1000, limits=Limits(slot_notice=0.001, executors=3600))
    began = spark.conf.get("spark.app.startTime")
    # As if the driver had unpacked --archives for decades.
    spark.conf.set("spark.app.startTime", "0")
    try:
        with (
            contextlib.redirect_stderr(Calling("waiting for slots", 1, runner.cancel)),
            pytest.raises(CancelledError),
        ):
            runner.run(print)
    finally:
        spark.conf.set("spark.app.startTime", began)


def test_a_run_with_a_dataframe_warns_of_nothing(spark: SparkSession, ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert ranks.runner(1).run(lambda data: 6, data=spark.range(4)) == 6


def test_np_0_uses_all_slots_and_warns(spark: SparkSession, ranks: Ranks) -> None:
    with pytest.warns(DeprecationWarning, match="np=0"):
        runner = ranks.runner(0)
    assert runner.run(lambda: __import__("os").environ["HOROVOD_SIZE"]) == "4"


def test_the_active_session_is_used(spark: SparkSession, ranks: Ranks) -> None:
    gpus = 0 if ranks.place == "cluster" else None
    assert HorovodRunner(np=1, gpus_per_rank=gpus).run(lambda: 6) == 6
