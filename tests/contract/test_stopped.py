"""SIGSTOP for each process of a run in turn: nothing waits for it longer than its limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from horovod_runner import CancelledError, HangError, RankFailedError, RunHandle, log_to_driver
from horovod_runner.common.limits import Limits
from horovod_runner.host.processes import wait_for_end
from tests.conftest import Ranks
from tests.contract.test_warm import end_servers
from tests.programs import ROOT, Program, await_condition

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
#: Short where a stopped process is waited for.
_LIMITS = Limits(
    silent_task=3.0,
    reconnect_task=2.0,
    worker_end=0.5,
    guard_end=1.0,
    ranks_end=3.0,
    launch_end=5.0,
    fork_server=2.0,
)


def train(folder: str) -> str:
    """A rank that says who it is, and goes on until a file says stop."""
    rank, here = os.environ["RANK"], Path(folder)
    parents = [f"{parent.pid}" for parent in psutil.Process().parents()]
    _write(here / f"rank-{rank}", " ".join([f"{os.getpid()}", *parents]))
    rounds = 0
    while not (here / "stop").exists():
        rounds += 1
        time.sleep(0.1)
        _write(here / f"rounds-{rank}", f"{rounds}")
        if rounds % 5 == 0:
            log_to_driver(f"round {rounds}")
    return "done"


def _write(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def await_rounds(folder: Path, count: int) -> None:
    """Wait until both ranks have gone on for some more rounds of a tenth of a second."""
    before = [int((folder / f"rounds-{rank}").read_text()) for rank in range(2)]
    await_condition(
        lambda: all(
            int((folder / f"rounds-{rank}").read_text()) >= before[rank] + count
            for rank in range(2)
        )
    )


def processes(folder: Path, rank: int) -> list[psutil.Process]:
    """The process of a rank, its guard, and all above: the task's."""
    path = folder / f"rank-{rank}"
    await_condition(path.exists)
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


@contextmanager
def training(ranks: Ranks, folder: Path) -> Iterator[RunHandle]:
    """A run of two ranks, which does not outlast the block."""
    handle = ranks.runner(2, limits=_LIMITS).start(train, folder=str(folder))
    try:
        yield handle
    finally:
        handle.cancel()


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A process that does nothing in this block."""
    process.suspend()
    try:
        await_condition(lambda: process.status() == psutil.STATUS_STOPPED)
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


# On Spark the tasks go on without the driver; local ones are stopped with it.
def test_a_driver_that_was_stopped_accuses_nobody(ranks: Ranks, tmp_path: Path) -> None:
    size = 2 if ranks.spark is not None else -2
    script = ranks.opening + textwrap.dedent(
        f"""
        from horovod_runner import ClusterConfig, HorovodRunner
        from horovod_runner.common.limits import Limits
        from tests.contract.test_stopped import train
        # A connection that breaks off, on a busy machine, would lose messages on their way.
        waits = dict(reconnect_driver=60.0, heartbeat=60.0)
        limits = Limits(silent_task=3.0, reconnect_task=2.0, **waits)
        runner = HorovodRunner(np={size}, cluster_config=ClusterConfig(limits=limits))
        print("returned", runner.run(train, folder="{tmp_path}"))
        """
    )
    program = [sys.executable, "-c", script]
    with Program(
        program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as driver:
        for rank in range(2):
            processes(tmp_path, rank)
        await_condition(lambda: all((tmp_path / f"rounds-{rank}").exists() for rank in range(2)))
        driver.send_signal(signal.SIGSTOP)
        await_rounds(tmp_path, 80)  # longer than silent_task
        driver.send_signal(signal.SIGCONT)
        await_rounds(tmp_path, 50)
        (tmp_path / "stop").touch()
        assert driver.stdout is not None
        told = driver.stdout.read()
        assert driver.wait() == 0, told
    assert "returned done" in told
    assert "lost" not in told
    assert "no progress" not in told


@pytest.mark.places("local", "spark")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_guard_is_stopped_still_ends(ranks: Ranks, rank: int, tmp_path: Path) -> None:
    with training(ranks, tmp_path) as handle:
        _, guard, *_ = processes(tmp_path, rank)
        processes(tmp_path, 1 - rank)
        with stopped(guard):
            (tmp_path / "stop").touch()
            assert handle.result(60) == "done"
    assert handle.run is not None
    told = " ".join(line.text for line in handle.run.logs)
    assert f"rank {rank}: the process has ended, and its guard (process {guard.pid})" in told
    assert f"rank {1 - rank}: the process" not in told


@pytest.mark.places("local", "spark")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("which", ["worker", "guard"])
def test_a_run_of_which_a_process_is_stopped_can_be_cancelled(
    ranks: Ranks, which: str, rank: int, tmp_path: Path
) -> None:
    with training(ranks, tmp_path) as handle:
        worker, guard, *_ = processes(tmp_path, rank)
        others = processes(tmp_path, 1 - rank)[:2]
        with stopped(worker if which == "worker" else guard):
            handle.cancel()
            with pytest.raises(CancelledError):
                handle.result(60)
            assert wait_for_end([worker, guard, *others], 20) == []


@pytest.mark.horovod
@pytest.mark.places("local")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_of_a_training_is_named(ranks: Ranks, rank: int) -> None:
    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for step in range(1_000_000):
            hvd.allreduce(torch.ones(3), name="gradient")
            if hvd.rank() == rank and step == 10:
                os.kill(os.getpid(), signal.SIGSTOP)

    options = {"hang_timeout": 3.0, "limits": _LIMITS}
    told = rf"rank {rank} is stopped \(SIGSTOP.*SIGCONT"
    with pytest.raises(HangError, match=told) as caught:
        ranks.run(2, main, options)
    assert f"Stack of rank {rank}:\n  | no answer" in str(caught.value)


@pytest.mark.places("local")
@pytest.mark.warm("numpy")
def test_a_fork_server_that_is_stopped_does_not_keep_its_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stack.callback(end_servers)
        handle = stack.enter_context(training(ranks, tmp_path))
        family = [processes(tmp_path, rank) for rank in range(2)]
        (server,) = {parents[2] for parents in family}
        with stopped(server):
            (tmp_path / "stop").touch()
            assert handle.result(60) == "done"
            ranks_and_guards = [process for parents in family for process in parents[:2]]
            assert wait_for_end(ranks_and_guards, 20) == []


@pytest.mark.places("spark", "cluster")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_task_is_stopped_is_named(ranks: Ranks, rank: int, tmp_path: Path) -> None:
    with training(ranks, tmp_path) as handle:
        worker, guard, task, *_ = processes(tmp_path, rank)
        others = processes(tmp_path, 1 - rank)[:2]
        with stopped(task):
            error = handle.exception(60)
            assert isinstance(error, RankFailedError)
            assert re.search(rf"rank {rank} .* was lost.* stopped \(SIGSTOP", str(error))
            assert wait_for_end([worker, guard, *others], 20) == []  # Spark kills the task


@pytest.mark.places("cluster")
def test_a_run_whose_executor_is_stopped_can_be_cancelled(ranks: Ranks, tmp_path: Path) -> None:
    with training(ranks, tmp_path) as handle:
        family = [processes(tmp_path, rank) for rank in range(2)]
        executor = next(each for each in family[0] if "java" in each.name())
        with stopped(executor):
            (tmp_path / "stop").touch()
            ranks_and_guards = [process for parents in family for process in parents[:2]]
            assert wait_for_end(ranks_and_guards, 20) == []
            assert not handle.done()  # their values cannot come back
            handle.cancel()
            assert isinstance(handle.exception(60), CancelledError)
