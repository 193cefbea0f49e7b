"""Runs that go on with the ranks that are there, with every launcher that can keep a pool."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_runner import (
    CancelledError,
    SlotError,
    commit,
    current_attempt,
    load_checkpoint,
    log_to_driver,
)
from horovod_runner.data import Shard, parquet
from horovod_runner.host.scratch import scratch_folder
from horovod_runner.sinks import Sink
from tests.conftest import Ranks

POOLS = ("local", "spark", "cluster", "slurm")
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


@pytest.mark.horovod
@pytest.mark.places(*POOLS)
def test_a_killed_rank_is_replaced_in_the_same_run(ranks: Ranks) -> None:
    def main(wait: bool) -> dict[str, int]:
        import horovod.torch as hvd
        import torch

        checkpoint = load_checkpoint() if int(os.environ["WORLD_SIZE"]) == 1 else None
        assert checkpoint is None
        hvd.init()
        if wait and current_attempt() == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        together = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        return {"ranks": int(together), "attempt": current_attempt()}

    runner = ranks.runner((2, 3), max_restarts=1)
    assert runner.run(main, wait=True) == {"ranks": 3, "attempt": 2}
    first, second = runner.last_run.attempts
    assert "rank 1" in first.error
    assert "SIGKILL" in first.error
    assert (first.size, second.size) == (3, 3)
    assert len(second.hosts) == 3
    assert not second.error


@pytest.mark.places(*POOLS)
def test_a_killed_rank_leaves_no_temporary_files_where_the_next_one_runs(
    ranks: Ranks, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": range(10)}), tmp_path / "rows.parquet")

    def main(rows: Shard) -> list[str]:
        folder = scratch_folder()
        (folder / f"copy {current_attempt()}").write_bytes(b"x" * 1000)
        if current_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [path.name for path in folder.parent.rglob("copy*")]

    runner = ranks.runner((1, 1), max_restarts=1)
    assert runner.run(main, rows=parquet(str(tmp_path))) == ["copy 2"]
    assert len(runner.last_run.attempts) == 2


@pytest.mark.places("local")
def test_the_last_rank_to_save_is_not_asked_to_leave_for_those_that_have_returned(
    ranks: Ranks, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "alive")

    def main() -> None:
        if current_attempt() > 1:
            return
        if os.environ["RANK"] == "1":
            os.open(tmp_path / "alive", os.O_WRONLY)  # until the process has ended
            return
        (tmp_path / "alive").read_bytes()  # until rank 1 has ended
        for step in range(2000):  # while the driver hears of it
            commit({"step": step}, step)

    runner = ranks.runner((2, 2), grow_after=0)
    runner.run(main)
    assert len(runner.last_run.attempts) == 1


@pytest.mark.places("spark", "cluster", "slurm")
def test_a_run_takes_the_slots_that_there_are(ranks: Ranks) -> None:
    assert ranks.run((2, 9), lambda: os.environ["WORLD_SIZE"]) == "4"


@pytest.mark.places("spark", "cluster", "slurm")
def test_too_few_slots_for_the_least_number_are_refused(ranks: Ranks) -> None:
    with pytest.raises(SlotError, match=r"np=5|at least 5"):
        ranks.run((5, 9), lambda: None, {"slot_timeout": 0.5})


@pytest.mark.places(*POOLS)
def test_an_error_of_main_ends_the_run(ranks: Ranks) -> None:
    def main() -> None:
        raise ValueError("no")

    runner = ranks.runner((2, 2))
    with pytest.raises(ValueError, match="no"):
        runner.run(main)
    assert len(runner.last_run.attempts) == 1
    assert not runner.last_run.attempts[0].change


@pytest.mark.places("local", "spark", "slurm")
def test_a_cancelled_run_leaves_nothing(ranks: Ranks) -> None:
    class Cancel(Sink):
        def log(self, rank: int, text: str) -> None:
            runner.cancel()

    def main() -> None:
        log_to_driver("running")
        threading.Event().wait()

    runner = ranks.runner((2, 3), sinks=[Cancel()])
    with pytest.raises(CancelledError):
        runner.run(main)


@pytest.mark.places("connect")
def test_a_range_is_refused_on_connect(ranks: Ranks) -> None:
    with pytest.raises(SlotError, match="Connect server"):
        ranks.run((2, 3), lambda: None)
