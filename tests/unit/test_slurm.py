"""The Slurm launcher reads its allocation from the environment."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from horovod_runner import ClusterConfig, DataError, HorovodRunner, LaunchError, SlotError
from horovod_runner.launchers.slurm import SlurmLauncher
from horovod_runner.launchers.srun import command

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
    with pytest.raises(LaunchError, match=r"in none \(SLURM_JOB_ID is not set\).*salloc"):
        HorovodRunner(np=2, cluster_config=ClusterConfig(launcher="slurm")).run(print)


def test_an_allocation_has_a_slot_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SlurmLauncher()
    assert launcher.where == "slurm job 12"
    assert launcher.slots(3) == 3
    assert launcher.slots(0) == 4
    with pytest.raises(SlotError, match=r"np=5 asks for 5 slots, and allocation 12 has 4 task"):
        launcher.slots(5)
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert SlurmLauncher().slots(0) == 2
    with pytest.raises(SlotError, match=r"no --ntasks, which makes it one for each node.*=3"):
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
    with pytest.raises(LaunchError, match=r"knows no route to the node no\.such\.node"):
        SlurmLauncher()


def test_dataframes_without_a_shared_folder_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(DataError, match=r"data: Slurm's tasks get no rows from Spark.*shared_dir"):
        SlurmLauncher().launch(nothing, nothing, print, {"data": object()})


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
