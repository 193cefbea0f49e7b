"""A standalone cluster: two executors, and GPUs that Spark schedules."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from horovod_runner import (
    ClusterConfig,
    HorovodRunner,
    RankFailedError,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    save_checkpoint,
)
from tests.cluster.standalone import executor
from tests.conftest import Ranks
from tests.contract.test_end import Calling
from tests.programs import run_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.places("cluster"),
    pytest.mark.usefixtures("nothing_left"),
]


def own_gpu() -> dict[str, Any]:
    shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return {
        "shown": shown,
        "own_gpu": shown[int(os.environ["HOROVOD_RUNNER_DEVICE"])],
        "idiom": shown[int(os.environ["LOCAL_RANK"])],
        "executor": executor().cwd(),
    }


def _log_gpu() -> None:
    log_to_driver(repr((int(os.environ["RANK"]), own_gpu())))


# Slow: a cluster with GPUs is started, a master and two workers, and its executors are cold.
def test_each_rank_has_the_gpu_that_spark_gave_its_task(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    HorovodRunner(np=4, cluster_config=ClusterConfig(spark=spark)).run(_log_gpu)
    captured = capsys.readouterr()
    gpus = dict(eval(line) for line in captured.out.splitlines())
    assert sorted(gpu["own_gpu"] for gpu in gpus.values()) == ["0", "1", "2", "3"]
    for gpu in gpus.values():
        # All four ranks run on this host: each sees all four GPUs, in local_rank order.
        assert sorted(gpu["shown"]) == ["0", "1", "2", "3"]
        assert gpu["idiom"] == gpu["own_gpu"]
        # The first worker offers 0 and 1, the second 2 and 3.
        assert f"work-{int(gpu['own_gpu']) // 2}" in gpu["executor"]
    assert len({gpu["executor"] for gpu in gpus.values()}) == 2
    table = [line.split() for line in captured.err.splitlines() if line.split()[1].isdigit()]
    assert {int(row[1]): row[4] for row in table} == {r: g["own_gpu"] for r, g in gpus.items()}


def test_masking_shows_a_rank_only_its_own_gpu(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    HorovodRunner(np=4, cluster_config=ClusterConfig(spark=spark, gpu_pinning="mask")).run(
        lambda: log_to_driver(os.environ["CUDA_VISIBLE_DEVICES"])
    )
    assert sorted(capsys.readouterr().out.split()) == ["0", "1", "2", "3"]


def test_gpus_per_rank_0_hides_all_gpus(ranks: Ranks) -> None:
    shown = ranks.run(2, lambda: os.environ["CUDA_VISIBLE_DEVICES"], {"gpus_per_rank": 0})
    assert shown == ""


def test_the_error_says_what_executors_without_the_package_lack(
    spark: SparkSession, tmp_path: Any
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    # What a Spark task itself needs, without this package.
    links = next(bare.glob("lib/python*/site-packages"))
    for name in ("pyspark", "py4j", "pyarrow", "numpy", "numpy.libs", "pandas", "pytz", "dateutil"):
        if os.path.exists(os.path.join(packages, name)):
            (links / name).symlink_to(os.path.join(packages, name))
    (links / "six.py").symlink_to(os.path.join(packages, "six.py"))
    script = """
        from pyspark.sql import SparkSession
        from horovod_runner import HorovodRunner
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
        spark = spark.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        try:
            HorovodRunner(np=1).run(print)
        finally:
            spark.stop()
        """
    python = {"PYSPARK_PYTHON": str(bare / "bin" / "python")}
    done = run_python(script, variables=python, cwd=tmp_path)
    assert "the executors' Python has no horovod_runner" in done.stderr


def _wait_for_ever() -> None:
    log_to_driver(f"up {os.environ['RANK']} {executor().pid}")
    threading.Event().wait()


class Killing(Calling):
    """Kills the second executor when all four ranks are up; their lines name its process."""

    def __init__(self) -> None:
        super().__init__("up", 4, self.kill)
        self.killed: list[int] = []

    def kill(self) -> None:
        self.killed.append(max(self.executors.values()))
        os.kill(self.killed[-1], signal.SIGKILL)

    @property
    def executors(self) -> dict[int, int]:
        lines = [line.split() for line in self.getvalue().splitlines()]
        return {int(line[1]): int(line[2]) for line in lines}


# Slow: executors start cold, and Spark takes seconds to notice that one has gone.
def test_a_killed_executor_is_reported_as_the_loss_of_its_rank(ranks: Ranks) -> None:
    runner = ranks.runner(4, slot_timeout=120)
    with (
        contextlib.redirect_stdout(Killing()) as shown,
        pytest.raises(RankFailedError) as caught,
    ):
        runner.run(_wait_for_ever)
    assert shown.killed == [shown.executors[caught.value.rank]]
    assert f"rank {caught.value.rank} of 4" in str(caught.value)
    assert "was lost" in str(caught.value)
    assert "ExecutorLostFailure" in str(caught.value)
    assert runner.run(int) == 0  # Spark starts another executor


@pytest.mark.horovod
def test_after_a_killed_executor_the_run_resumes_from_the_last_checkpoint(ranks: Ranks) -> None:
    def main() -> tuple[int, int]:
        import horovod.torch as hvd

        hvd.init()
        loaded = load_checkpoint()
        if loaded is not None:
            return loaded.step, current_attempt()
        save_checkpoint({"step": 7}, 7)
        save_checkpoint({"step": 8}, 8)  # waits until the one of step 7 is complete
        _wait_for_ever()
        raise AssertionError

    runner = ranks.runner(4, max_restarts=1)
    with contextlib.redirect_stdout(Killing()) as shown:
        step, attempt = runner.run(main)
    assert (step in (7, 8), attempt, len(shown.killed)) == (True, 2, 1)
    run = runner.last_run
    assert [attempt.resumed_from for attempt in run.attempts] == [None, step]
    assert "was lost" in run.attempts[0].error
