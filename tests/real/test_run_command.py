"""`horovod-runner run`, `ps` and `stop` as a shell sees them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_runner.host.processes import wait_for_end
from horovod_runner.results import registry
from horovod_runner.wire import job_file
from tests import programs
from tests.preload import COMMAND
from tests.programs import Program, await_condition

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("own_records")]

SCRIPT = """
import os, signal, sys, threading
import helper
from horovod_runner import current_attempt, load_checkpoint, save_checkpoint

class Net:
    pass

def main():
    what, rank = sys.argv[1:], os.environ["RANK"]
    print("rank", rank, "of", os.environ["WORLD_SIZE"], __name__, helper.X, what, flush=True)
    if "wait" in what:
        print("waits", os.getpid(), flush=True)
        threading.Event().wait()
    if "exit" in what:
        sys.exit(7)
    if "raise" in what and rank == "1":
        raise ValueError("what was wrong")
    if "die" in what and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if "once" in what and current_attempt() == 1:
        save_checkpoint({"step": 5}, 5)
        raise RuntimeError("the first time")
    found = load_checkpoint() if os.environ["WORLD_SIZE"] == "1" else None
    return f"goes on from {found and found.state['step']}, {Net.__module__}"

if __name__ == "__main__":
    main()
"""

STARTS_PROCESSES = """
import multiprocessing, os

class Point:
    def __init__(self, x):
        self.x = x

def twice(x):
    return Point(2 * x)

def main():
    os.remove(__file__)  # other hosts do not have it
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("made", [point.x for point in pool.map(twice, [1, 2]) if type(point) is Point])

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("X = 42\n")
    return tmp_path


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(COMMAND, "run", *arguments, cwd=folder)


def other(*arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run(COMMAND, *arguments)


def listed() -> list[dict[str, Any]]:
    """What `ps` shows of this test's runs; others may be under way on this machine."""
    found: list[dict[str, Any]] = json.loads(other("ps", "--json").stdout)
    return [run for run in found if run["entry"] is not None]


@pytest.fixture
def waiting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose two ranks wait for ever."""
    with Program(
        [COMMAND, "run", "train.py", "--np", "-2", "--", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        seen = 0
        while seen < 2:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            seen += "waits" in line
        yield process
        if process.poll() is None:
            process.kill()


def test_a_script_runs_on_every_rank_with_its_own_arguments(folder: Path) -> None:
    done = run("train.py", "--np", "-2", "--", "--lr", "0.1", "--", "x", folder=folder)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = f"[{rank}] rank {rank} of 2 __main__ 42 ['--lr', '0.1', '--', 'x']"
        assert said in done.stdout


def test_a_function_is_called_and_what_it_returns_is_printed(folder: Path) -> None:
    done = run("train.py:main", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1 train 42 []" in done.stdout
    assert done.stdout.endswith("goes on from None, train\n")
    by_module = run("train:main", folder=folder)
    assert by_module.stdout == done.stdout, by_module.stderr


@pytest.mark.spark
def test_it_runs_on_a_spark_master(folder: Path) -> None:
    where = ["--master", "local[2]", "--np", "2", "--conf", "spark.ui.enabled=false"]
    done = run("train.py", *where, "--cpu", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "[1] rank 1 of 2 __main__ 42 []" in done.stdout


@pytest.mark.parametrize(
    ("what", "status", "told"),
    [
        ("exit", 7, "main called sys.exit, exit code 7"),
        ("raise", 1, "ValueError: what was wrong"),
        ("die", 128 + signal.SIGKILL, "SIGKILL"),
    ],
)
def test_the_exit_status_is_the_trainings(folder: Path, what: str, status: int, told: str) -> None:
    done = run("train.py", "--np", "-2", "--", what, folder=folder)
    assert done.returncode == status
    assert told in done.stderr
    # The training's own traceback, and nothing of what launched it.
    assert "horovod_runner/" not in done.stderr


def test_it_restarts_and_goes_on_from_a_checkpoint(folder: Path) -> None:
    kept = ["--checkpoint-dir", "kept", "--max-restarts", "1"]
    done = run("train.py:main", *kept, "--", "once", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "goes on from 5" in done.stdout
    again = run("train.py:main", "--checkpoint-dir", "kept", "--resume", folder=folder)
    assert "goes on from 5" in again.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(
    waiting: subprocess.Popen[str], number: signal.Signals, status: int
) -> None:
    waiting.send_signal(number)
    _, said = waiting.communicate()
    assert waiting.returncode == status
    assert "interrupted: ending all ranks" in said
    assert listed() == []


def test_ps_lists_a_run_and_stop_ends_it(waiting: subprocess.Popen[str]) -> None:
    (found,) = listed()
    entry, run_id = found["entry"], found["run_id"]
    assert (entry["main"], entry["np"], entry["where"]) == ("train.py", -2, "local")
    assert entry["pid"] == waiting.pid
    assert {pid for _, _, pid in entry["ranks"]} <= set(found["processes"])
    assert re.search(rf"{run_id} +train.py +-2 +local ", other("ps").stdout)
    place = Path(os.environ["XDG_STATE_HOME"], "horovod_runner", "runs")  # this user's alone
    assert all(path.stat().st_mode & 0o077 == 0 for path in (place, *place.iterdir()))
    assert other("stop", "nothing").returncode == 1
    processes = [psutil.Process(pid) for pid in found["processes"]]
    # A part of its id will do.
    stopped = other("stop", run_id[:5])
    assert stopped.stdout == f"{run_id}: ended\n"
    _, said = waiting.communicate()
    assert waiting.returncode == 143
    assert f"run {run_id} was cancelled" in said
    assert wait_for_end(processes, 5) == []


def test_stop_ends_what_a_killed_driver_left_behind(waiting: subprocess.Popen[str]) -> None:
    (found,) = listed()
    workers = [psutil.Process(pid) for _, _, pid in found["entry"]["ranks"]]
    # The guards would end them at once: frozen, they stand for what nobody can foresee.
    for guard in {worker.parent() for worker in workers}:
        assert guard is not None
        guard.suspend()
    waiting.kill()
    waiting.wait()
    assert all(worker.is_running() for worker in workers)
    assert "(gone)" in other("ps").stdout
    assert other("stop", found["run_id"]).returncode == 0
    assert wait_for_end(workers, 5) == []
    assert listed() == []
    assert found["run_id"] not in other("ps").stdout


def test_a_driver_that_was_killed_leaves_no_entry(waiting: subprocess.Popen[str]) -> None:
    (found,) = listed()
    waiting.kill()
    waiting.wait()
    # Its ranks end by themselves.
    await_condition(lambda: found["run_id"] not in other("ps").stdout, 30)
    assert not list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.json"))


def test_the_page_of_a_run_is_of_this_moment_and_says_when_its_driver_was_killed(
    waiting: subprocess.Popen[str], folder: Path
) -> None:
    (found,) = listed()
    done = other("report", found["run_id"][:6], "-o", str(folder / "running.html"))
    assert (done.returncode, done.stderr) == (0, "")
    text = (folder / "running.html").read_text()
    assert "The run goes on" in text
    assert text.count("<span>waits ") == 2
    waiting.kill()
    waiting.wait()
    assert other("report", "-o", str(folder / "lost.html")).returncode == 0
    text = (folder / "lost.html").read_text()
    assert "no driver of it runs on this machine any more" in text
    assert text.count("<span>waits ") == 2
    assert re.search(
        rf"{found['run_id']}  train.py  -2  local  lost", other("report", "--list").stdout
    )
    other("stop", found["run_id"])  # not --all: other tests have runs here too


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts and sees processes of others")
def test_processes_of_others_belong_to_no_run_of_ours() -> None:
    variables = {job_file.RUN_VARIABLE: "of-another"}
    with subprocess.Popen(["sleep", "1000"], user=65534, env=variables) as process:
        try:
            assert psutil.Process(process.pid).environ() == variables
            assert "of-another" not in registry._processes()
        finally:
            process.kill()


@pytest.mark.parametrize("function", ["", ":main"])
def test_processes_that_a_script_starts_anew_know_its_classes(folder: Path, function: str) -> None:
    (folder / "starts.py").write_text(STARTS_PROCESSES)
    done = run("--np", "-1", f"starts.py{function}", folder=folder)
    assert "made [2, 4]" in done.stdout, done.stderr
