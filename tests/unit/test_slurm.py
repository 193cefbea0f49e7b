"""The Slurm launcher reads its allocation from the environment."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import ClusterConfig, DataError, HorovodRunner, LaunchError, SlotError
from horovod_runner.common.options import Options
from horovod_runner.driver.launcher import LaunchRequest, PoolRequest
from horovod_runner.launchers import srun
from horovod_runner.launchers.slurm import SlurmLauncher, outcome_lines, read_outcomes
from horovod_runner.launchers.srun import command
from horovod_runner.wire.job import Job, Outcome
from tests.programs import script

HERE = socket.gethostname().split(".")[0]


@pytest.fixture(autouse=True)
def _in_allocation_12(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPUS_PER_TASK", "JOB_GPUS", "STEP_ID", "JOB_NUM_NODES"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NODELIST", HERE)


def test_outside_an_allocation_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(LaunchError, match=r"SLURM_JOB_ID .*salloc"):
        HorovodRunner(np=2, cluster_config=ClusterConfig(launcher="slurm")).run(print)


def test_an_allocation_has_a_slot_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SlurmLauncher()
    assert launcher.where == "slurm job 12"
    assert launcher.slots(3) == 3
    assert launcher.slots(0) == 4
    with pytest.raises(SlotError, match=r"np=5 .*allocation 12 .* 4 task.*--ntasks=5"):
        launcher.slots(5)
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert SlurmLauncher().slots(0) == 2
    with pytest.raises(SlotError, match=r"np=3 .* 2 task\(s\) \(no --ntasks.*--ntasks=3"):
        SlurmLauncher().slots(3)


def test_only_ranks_on_the_drivers_node_share_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SlurmLauncher().shares_files
    assert SlurmLauncher().channel_host == "127.0.0.1"
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    other = SlurmLauncher()
    assert not other.shares_files
    monkeypatch.setenv("SLURM_JOB_NODELIST", "no.such.node.invalid")
    with pytest.raises(LaunchError, match=r"no\.such\.node\.invalid: .*HOROVOD_GLOO_IFACE"):
        SlurmLauncher()


def test_a_list_of_several_nodes_is_read_by_slurms_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = pytest.raises(LaunchError, match=r"^`scontrol show hostnames node\[1-2\]` fails: ")
    with refused:
        SlurmLauncher()  # PATH has no scontrol
    script(tmp_path / "scontrol", "exit 1")
    with refused:
        SlurmLauncher()
    right = '[ "$*" = "show hostnames node[1-2]" ] || exit 1\n'
    script(tmp_path / "scontrol", f"{right}echo {HERE}")
    assert SlurmLauncher().shares_files
    script(tmp_path / "scontrol", f"{right}echo {HERE}\necho localhost")
    assert not SlurmLauncher().shares_files


def test_dataframes_without_a_shared_folder_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(DataError, match=r"data: .*Slurm.*shared_dir="):
        SlurmLauncher().launch(LaunchRequest(nothing, nothing, print, {"data": object()}))


def test_srun_gets_the_allocations_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = command(3)
    assert plain[:2] == ["srun", "--ntasks=3"]
    assert plain[-2:] == ["-m", "horovod_runner.launchers.slurm"]
    assert sys.executable in plain
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    more = set(command(3)) - set(plain)
    assert more == {"--cpus-per-task=8", "--gpu-bind=none", "--overlap"}


def test_a_task_may_start_while_the_pool_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, may_start = threading.Event(), threading.Event(), threading.Event()

    class Ended(subprocess.Popen[bytes]):
        """The srun of a seat. That of the second one starts when the first one is ended."""

        def __init__(self, arguments: list[str], *_: object) -> None:
            self.returncode = 0
            self._begun = first if arguments[-1] == "0" else second
            if self._begun is second:
                may_start.wait()

        def communicate(self, *_: object, **__: object) -> tuple[bytes, bytes]:
            self._begun.set()
            return b"", b""

        def terminate(self) -> None:
            may_start.set()
            second.wait()

    monkeypatch.setattr(srun, "start", Ended)
    nowhere: Any = None
    job = Job("test", 2, Options(np=(1, 2)), b"")
    members = srun.SlurmMembers(PoolRequest(job, 2, nowhere, lambda *_: None, lambda *_: None))
    assert first.wait(20)
    members.close([], 10.0)


def _outcome(task: int) -> Outcome:
    return Outcome(task=task, rank=task, tail=[f"line {number}" for number in range(task * 150)])


def test_outcomes_are_whole_however_srun_cuts_and_mixes_what_tasks_print() -> None:
    """srun sends at most 1,024 bytes of a task at a time, and need not end them with a line."""
    outcomes = {task: _outcome(task) for task in range(4)}
    printed = [outcome_lines(*each).encode() for each in outcomes.items()]
    pieces = [
        [text[at : at + 1024] for at in range(0, len(text), 1024)] for text in reversed(printed)
    ]
    assert len(pieces[0]) > len(pieces[1]) > len(pieces[2]) > len(pieces[3]) > 0
    mixed = b"".join(
        piece for turn in itertools.zip_longest(*pieces, fillvalue=b"") for piece in turn
    )
    assert read_outcomes(mixed.splitlines(keepends=True)) == outcomes


def test_an_outcome_that_did_not_come_whole_is_left_out() -> None:
    lines = outcome_lines(1, _outcome(1)).encode().splitlines(keepends=True)
    other = outcome_lines(0, _outcome(0)).encode().splitlines(keepends=True)
    assert len(lines) > 3
    for left in (lines[1:], lines[:1] + lines[2:], lines[:-1], [lines[0][:100], *lines[1:]], []):
        assert set(read_outcomes([b"something else\n", *left, *other])) == {0}
