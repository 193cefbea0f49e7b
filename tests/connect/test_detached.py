"""Detached mode: no executor can reach the driver, which is behind NAT or a firewall."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_runner import (
    CancelledError,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.data import Shard
from horovod_runner.host.processes import wait_for_end
from horovod_runner.sinks import Sink
from tests.conftest import Ranks
from tests.connect.server import ConnectServer
from tests.contract.test_data import ROWS, dataset, labels_by_step, log_labels, table
from tests.contract.test_end import in_thread, sweep

pytestmark = [
    pytest.mark.spark,
    pytest.mark.places("connect"),
    pytest.mark.usefixtures("nothing_left"),
]

NOWHERE = "192.0.2.1"  # an address that no machine has


class Ear(Sink):
    """Keeps notices, and answers a log line with a file, for which the ranks wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.notices: list[str] = []

    def log(self, rank: int, text: str) -> None:
        (self._folder / f"heard-{rank}").touch()

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DRIVER_HOST", NOWHERE)


def hear_while_it_lasts(ranks: Ranks, folder: Path, *, saves: bool, **options: Any) -> str:
    """Make a run in which each rank waits until its line has been heard; returns the notices.

    The ranks' reports must be there at the end.

    Args:
        ranks: start it.
        folder: that the test and the ranks see.
        saves: whether the ranks save a checkpoint, which must be there at the end.
        **options: of the run.
    """

    def main() -> int:
        rank = int(os.environ["RANK"])
        log_to_driver("here")
        while not (folder / f"heard-{rank}").exists():
            threading.Event().wait(0.1)
        for step in range(10):
            report(loss=float(step), step=step)
        if saves:
            save_checkpoint({"step": 10}, 10)
        return rank

    ear = Ear(folder)
    runner = ranks.runner(2, **{"sinks": [ear], "checkpoint_dir": folder / "kept", **options})
    assert runner.run(main) == 0
    run = runner.last_run
    assert run.metrics["loss"].to_pylist() == list(range(10))
    assert [rank.exit_code for rank in run.ranks] == [0, 0]
    assert [saved.load() for saved in run.checkpoints] == [{"step": 10}] * saves
    return "\n".join(ear.notices)


@pytest.mark.places("connect", "cluster")
def test_output_and_results_arrive_by_a_shared_folder_while_the_run_lasts(
    ranks: Ranks, tmp_path: Path
) -> None:
    notices = hear_while_it_lasts(ranks, tmp_path, saves=True)
    assert f"through files in {tmp_path}/kept" in notices


@pytest.mark.places("cluster")  # a Connect server does not tell where task 0 runs
@pytest.mark.usefixtures("hidden")
def test_output_and_reports_arrive_over_a_connection_of_the_driver(
    ranks: Ranks, tmp_path: Path
) -> None:
    notices = hear_while_it_lasts(ranks, tmp_path, saves=False)
    assert "over a connection from here to 127." in notices


@pytest.mark.usefixtures("hidden")
def test_output_arrives_at_the_end_without_a_shared_folder(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> Any:
        print("printed")
        log_to_driver("logged")
        return os.environ["WORLD_SIZE"]

    assert ranks.run(2, main, {"driver_log_verbosity": "all"}) == "2"
    captured = capsys.readouterr()
    lines = sorted(captured.out.splitlines())
    assert lines == ["[0] printed", "[1] printed", "logged", "logged"]
    assert captured.err.count(f"executors cannot reach this process at {NOWHERE}:") == 1
    assert "HOROVOD_RUNNER_DRIVER_HOST" in captured.err
    *_, head, first, second, controller = captured.err.splitlines()
    assert head.split()[1:] == ["rank", "host", "pid", "GPU"]
    assert [first.split()[1], second.split()[1]] == ["0", "1"]
    assert controller.startswith("HorovodRunner: controller: ")


@pytest.mark.horovod
def test_horovod_works_and_the_rows_of_a_dataframe_arrive(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(train: Shard) -> tuple[float, int]:
        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.ones(1) * (hvd.rank() + 1), op=hvd.Sum)
        return float(total), log_labels(train, batch_size=32)

    total, steps = ranks.run(4, main, train=dataset(ranks, table()))
    assert total == 10.0
    batches = labels_by_step(capsys.readouterr().out)
    assert len(batches) == 2 * steps
    assert Counter(label for labels in batches.values() for label in labels) == Counter(
        [*range(ROWS)] * 2
    )


class Pids:
    """A main: each rank writes its process id to a folder that the test sees, and waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> None:
        file = self._folder / f"new-{os.environ['RANK']}"
        file.write_text(str(os.getpid()))
        file.rename(self._folder / f"pid-{os.environ['RANK']}")
        threading.Event().wait()

    def wait(self, count: int, alive: Any) -> list[psutil.Process]:
        while len(files := list(self._folder.glob("pid-*"))) < count:
            assert alive()
            threading.Event().wait(0.1)
        return [psutil.Process(int(file.read_text())) for file in files]


def test_cancel_ends_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    runner, pids = ranks.runner(2), Pids(tmp_path)
    run = in_thread(lambda: runner.run(pids))
    processes = pids.wait(2, run.is_alive)
    runner.cancel()
    run.join()
    assert isinstance(run.error, CancelledError)
    assert wait_for_end(processes, 15) == []


def test_the_ranks_of_a_killed_driver_end_once_the_server_notices(
    ranks: Ranks, tmp_path: Path
) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from pyspark.sql import SparkSession
        from horovod_runner import ClusterConfig, HorovodRunner
        from tests.connect.test_detached import Pids
        spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
        runner = HorovodRunner(np=2, cluster_config=ClusterConfig(spark=spark))
        runner.run(Pids(Path(sys.argv[2])))
        """
    )
    conf = {  # the defaults take up to eight minutes
        "spark.connect.execute.manager.detachedTimeout": "2s",
        "spark.connect.execute.manager.maintenanceInterval": "1s",
        "spark.connect.execute.reattachable.senderMaxStreamDuration": "5s",
    }
    with (
        ConnectServer(tmp_path, "local[2]", conf) as server,
        subprocess.Popen(
            [sys.executable, "-c", script, server.url, str(tmp_path)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        ) as driver,
    ):
        try:
            processes = Pids(tmp_path).wait(2, lambda: driver.poll() is None)
        finally:
            driver.kill()
        assert wait_for_end(processes, 200) == []
    sweep()


@pytest.mark.usefixtures("hidden")
def test_of_very_long_output_only_the_last_part_is_kept(ranks: Ranks) -> None:
    def main() -> None:
        for number in range(200):
            log_to_driver(f"{number:04}" * 25_000)

    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as notices,
    ):
        ranks.run(1, main)
    numbers = [int(line[:4]) for line in output.getvalue().splitlines()]
    assert numbers == list(range(200 - (16 << 20) // 100_000, 200))
    assert "too many to keep" in notices.getvalue()
