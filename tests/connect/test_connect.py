"""Spark Connect: a server between the driver and the executors, which may end by itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from horovod_runner import (
    CancelledError,
    ClusterConfig,
    HorovodRunner,
    LaunchError,
    Limits,
    SlotError,
)
from horovod_runner.host.processes import wait_for_end
from horovod_runner.launchers import connect
from tests.conftest import Ranks
from tests.contract.test_cancel import busy_slots
from tests.contract.test_end import Calling, in_thread, wait_for_ever
from tests.programs import Program

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.places("connect"),
    pytest.mark.usefixtures("nothing_left"),
]


def test_a_setting_for_the_partitions_of_a_range_hides_the_number_of_slots(
    spark: SparkSession,
) -> None:
    spark.conf.set("spark.sql.leafNodeDefaultParallelism", "17")
    try:
        assert connect.count_slots(spark) is None
        with pytest.raises(SlotError, match=r"^np=0 "), pytest.warns():
            HorovodRunner(np=0, cluster_config=ClusterConfig(spark=spark)).run(print)
    finally:
        spark.conf.unset("spark.sql.leafNodeDefaultParallelism")


def test_another_thread_finds_the_session(spark: SparkSession, ranks: Ranks) -> None:
    values: list[Any] = []
    in_thread(lambda: values.append(HorovodRunner(np=1, gpus_per_rank=0).run(lambda: 6))).join()
    assert values == [6]


def test_the_wait_for_busy_slots_is_limited_and_can_be_cancelled(
    ranks: Ranks, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with busy_slots(ranks, 4, tmp_path):
        with pytest.raises(SlotError, match=r"^np=2: .* 2 s\. .*slot_timeout"):
            ranks.run(2, trace.touch, {"limits": Limits(connect_task=2)})
        runner = ranks.runner(2)
        run = in_thread(lambda: runner.run(trace.touch))
        while run.is_alive():
            runner.cancel()
            run.join(0.5)
        assert isinstance(run.error, CancelledError)
    assert ranks.run(4, int) == 0
    assert not trace.exists()  # neither job started once the slots were free


def test_a_session_that_is_stopped_ends_its_run(ranks: Ranks) -> None:
    from pyspark.sql import SparkSession

    other = SparkSession.builder.remote(ranks.url).create()
    runner = HorovodRunner(np=2, cluster_config=ClusterConfig(spark=other), gpus_per_rank=0)

    with (
        contextlib.redirect_stdout(Calling("up", 2, partial(in_thread, other.stop))),
        pytest.raises(LaunchError, match=r"(?i)session was (closed|stopped)"),
    ):
        runner.run(wait_for_ever)


# Slow: a server of Spark Connect, whose Python workers are cold.
def test_a_job_that_the_user_interrupts_ends_its_run(ranks: Ranks) -> None:
    assert ranks.spark is not None
    interrupt = partial(ranks.spark.interruptTag, "the-users-tag")
    ranks.spark.addTag("the-users-tag")
    try:
        with (
            contextlib.redirect_stdout(Calling("up", 2, partial(in_thread, interrupt))),
            pytest.raises(LaunchError, match="OPERATION_CANCELED"),
        ):
            ranks.run(2, wait_for_ever)
        assert ranks.spark.getTags() == {"the-users-tag"}
    finally:
        ranks.spark.removeTag("the-users-tag")


def test_the_error_names_another_python_version_on_the_executors(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    with pytest.raises(LaunchError, match=r" 3\.99 .*PYSPARK_PYTHON"):
        ranks.run(1, print)


def test_the_ranks_end_with_a_killed_server(ranks: Ranks, tmp_path: Path) -> None:
    # In a separate process: this one's client would retry for ten minutes.
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import sys
            from pathlib import Path
            from horovod_runner import ClusterConfig, HorovodRunner, LaunchError
            from tests.connect.server import ConnectServer
            from tests.contract.test_end import family

            server = ConnectServer(Path(sys.argv[1])).__enter__()
            print("server", server.pid, flush=True)
            try:
                cluster = ClusterConfig(spark=server.session())
                HorovodRunner(np=2, cluster_config=cluster).run(family)
            except LaunchError as error:
                print(error, flush=True)
            os._exit(0)
            """
        )
    )
    with Program(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as driver:
        assert driver.stdout is not None
        server = psutil.Process(int(driver.stdout.readline().split()[1]))
        try:
            lines = [driver.stdout.readline() for _ in range(2)]
            processes = [psutil.Process(int(pid)) for line in lines for pid in line.split()[1:]]
            processes += server.children(recursive=True)
            server.kill()
            assert wait_for_end(processes, 15) == []
            assert "has ended in the middle of the run" in driver.stdout.read()
        finally:
            driver.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()
