"""Settings of a Spark session that would end or distort a training or a query that scores."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from horovod_runner import HorovodRunner, LaunchError, PredictionError, predict
from horovod_runner.common.spark_session import collect_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("spark", "connect")]

UDF = "spark.sql.execution.pyspark.udf."
KILLS = f"{UDF}killOnIdleTimeout"


@pytest.fixture
def killing(spark: SparkSession) -> Iterator[SparkSession]:
    """A session that kills Python workers which send nothing."""
    if spark.version < "4.1":
        pytest.skip("Spark 4.1 brought the setting")
    spark.conf.set(f"{UDF}idleTimeoutSeconds", "3600")
    spark.conf.set(KILLS, "true")
    yield spark
    spark.conf.unset(KILLS)
    spark.conf.unset(f"{UDF}idleTimeoutSeconds")


def setting_of_task(batches: Any) -> Any:
    import pyarrow as pa
    from pyspark import TaskContext

    for _ in batches:
        context = TaskContext.get()
        assert context is not None
        yield pa.RecordBatch.from_pydict({"value": [context.getLocalProperty(KILLS)]})


def test_a_training_may_send_nothing_for_hours(killing: SparkSession) -> None:
    rows = collect_in_arrow(killing.range(0, 1, 1, 1), setting_of_task, "value string")
    assert [row.value for row in rows] == ["false"]
    assert killing.conf.get(KILLS) == "true"


def test_scoring_may_take_long_for_a_batch_and_the_user_is_told(killing: SparkSession) -> None:
    def score(parts: Any) -> Any:
        return parts["id"] * 2

    with pytest.warns(UserWarning, match="killOnIdleTimeout was true.* for 3600 s"):
        scored = predict(killing.range(3), score, {"id": ["id"]}, output={"p": "long"})
    assert killing.conf.get(KILLS) == "false"
    assert sorted(row.p for row in scored.collect()) == [0, 2, 4]


@pytest.mark.parametrize("wide", [False, True])  # whole rows, and a function of the inputs
def test_a_model_gets_its_batch_size_whatever_sparks_batches_are(
    spark: SparkSession, wide: bool
) -> None:
    def rows_of(parts: Any) -> Any:
        return np.full(len(parts["id"]), len(parts["id"]))

    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "7")
    try:
        df = spark.range(0, 100, 1, 1)
        df = df.selectExpr("id", "repeat('a', 9) AS text") if wide else df
        scored = predict(df, rows_of, {"id": ["id"]}, output={"p": "long"}, batch_size=32)
        rows = [(row.id, row.p) for row in scored.collect()]
        assert [number for number, _ in rows] == list(range(100))
        assert {count for _, count in rows} == {32, 4}
    finally:
        spark.conf.set(name, before)


@pytest.mark.places("spark")
def test_a_value_may_be_larger_than_other_results(spark: SparkSession) -> None:
    name = "spark.driver.maxResultSize"
    conf = spark.sparkContext._jsc.sc().conf()  # type: ignore[union-attr]
    conf.set(name, "1m")
    try:
        assert len(HorovodRunner(np=1).run(lambda: os.urandom(3_000_000))) == 3_000_000
        assert conf.get(name) == "1m"
    finally:
        conf.remove(name)


@pytest.mark.places("spark")
def test_scoring_is_refused_where_its_framework_has_no_room(spark: SparkSession) -> None:
    import torch

    df, memory = spark.range(3), "spark.executor.pyspark.memory"
    spark._jsparkSession.sessionState().conf().setConfString(memory, "2g")  # a session refuses it
    try:
        with pytest.raises(PredictionError, match=r"memory=2g .*spark\.executor\.memoryOverhead"):
            predict(df, torch.nn.Linear(1, 1), {"x": ["id"]}, output={"p": "float"})
        with pytest.warns(UserWarning, match="memory=2g limits the address space"):
            predict(df, lambda parts: parts["id"], {"id": ["id"]}, output={"p": "long"})
    finally:
        spark._jsparkSession.sessionState().conf().unsetConf(memory)


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text().split()
    return bool(int(status[status.index("CapEff:") + 1], 16) >> number & 1)


@pytest.mark.places("spark")
def test_a_rank_has_no_limit_of_address_space_or_the_setting_is_named(spark: SparkSession) -> None:
    # As spark.executor.pyspark.memory does, which a running session cannot change.
    spark.sparkContext.setLocalProperty("resource.pyspark.memory", "1500")
    may_lift = _has_capability(24)  # CAP_SYS_RESOURCE
    refused = pytest.raises(LaunchError, match=r"spark\.executor\.pyspark\.memory limits")
    try:
        with nullcontext() if may_lift else refused:
            limits = HorovodRunner(np=1).run(lambda: resource.getrlimit(resource.RLIMIT_AS))
            assert limits == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    finally:
        spark.sparkContext.setLocalProperty("resource.pyspark.memory", None)
