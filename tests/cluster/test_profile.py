"""Stage-level scheduling: only the tasks of the barrier job take GPUs."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from tests.cluster.standalone import StandaloneCluster
from tests.programs import run_python

pytestmark = [pytest.mark.spark, pytest.mark.places("cluster")]
# In a separate process: a process can have only one application.
_SCRIPT = """
import os, sys
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession
from horovod_runner import ClusterConfig, HorovodRunner, SlotError, log_to_driver

def profile(gpus):
    takes = TaskResourceRequests().cpus(1).resource("gpu", gpus)
    return ResourceProfileBuilder().require(takes).build

def main():
    shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    log_to_driver("own " + shown[int(os.environ["HOROVOD_RUNNER_DEVICE"])])

builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
builder = builder.config("spark.executor.resource.gpu.amount", "2")
spark = builder.config("spark.executor.memory", "512m").getOrCreate()
def run(**options):
    config = ClusterConfig(spark=spark, **options)
    HorovodRunner(np=4, cluster_config=config).run(main)

run(resource_profile=profile(1))
try:
    run(resource_profile=profile(2), slot_timeout=0)
except SlotError as error:
    print(error)
spark.stop()
"""


@pytest.mark.skipif(
    pyspark.__version__ < "4", reason="DataFrames accept profiles from Spark 4.0 on"
)
def test_a_rank_takes_the_resources_of_the_profile(tmp_path: Path) -> None:
    with StandaloneCluster(tmp_path) as cluster:
        done = run_python(_SCRIPT, cluster.master)
    assert done.returncode == 0, done.stderr
    own = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("own ")]
    assert sorted(own) == ["0", "1", "2", "3"]
    assert "has 2. A slot is what one task takes: cpus 1, gpu 2" in done.stdout
