"""Horovod on an HPC cluster: verified, submitted, cancelled, and gone on with, on a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hpc import ROOT, require, start

pytestmark = [pytest.mark.horovod]
JOB = ("--nodes=1", "--ntasks-per-node=2", str(ROOT / "examples" / "train.sbatch"))
VENV = str(Path(sys.executable).parent.parent)


def slurm(*command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    # No variables of the allocation that other tests are in: this is a login node.
    names = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
    done = start(
        *("env", *(f"--unset={name}" for name in names)),
        *command,
        directory=directory,
        VENV=VENV,
        XDG_STATE_HOME=str(directory / "state"),
        CHECKPOINTS=str(directory / "checkpoints"),
    )
    assert done.returncode == 0, done.stderr
    return done


def submit(*arguments: str, directory: Path) -> str:
    said = slurm("sbatch", "--overcommit", *arguments, directory=directory).stdout
    found = re.search(r"batch job (\d+)", said)
    assert found, said
    return found[1]


def runs(directory: Path) -> list[dict[str, Any]]:
    """The runs of this test."""
    found: list[dict[str, Any]] = json.loads(
        slurm("horovod-runner", "ps", "--json", directory=directory).stdout
    )
    return [run for run in found if run["entry"] is not None]


def wait_for_end(job: str, directory: Path) -> str:
    """Until a job has ended; gives how."""
    deadline = time.monotonic() + 120
    while True:
        said = slurm("scontrol", "show", "job", job, "--oneliner", directory=directory).stdout
        found = re.search(r"JobState=(\w+)", said)
        assert found, said
        if found[1] not in ("PENDING", "RUNNING", "COMPLETING"):
            return found[1]
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


@pytest.fixture
def here(allocation: None, tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_the_install_is_verified_with_its_mpi(here: Path) -> None:
    done = slurm("srun", "--ntasks=1", "horovod-runner", "doctor", "--json", directory=here)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["MPI"]["status"] == found["Slurm"]["status"] == "ok"
    built = found["Horovod for torch"]["detail"]
    require(
        "" if "mpi" in built else "Horovod was built without MPI (horovod-runner install --mpi)"
    )
    assert "reduced to 3" in found["two ranks with torch"]["detail"]


def test_a_job_that_was_cancelled_leaves_nothing_and_goes_on_when_submitted_again(
    here: Path,
) -> None:
    job = submit(*JOB, "--epochs", "100000", directory=here)
    checkpoints = here / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.2)
    running = runs(here)
    assert [run["entry"]["where"] for run in running] == [f"slurm job {job}"]
    assert len(running[0]["entry"]["ranks"]) == 2
    slurm("scancel", job, directory=here)
    assert wait_for_end(job, here) == "CANCELLED"
    while left := runs(here):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert running[0]["run_id"] not in slurm("horovod-runner", "ps", directory=here).stdout
    last = max(int(path.name.split("-")[1]) for path in checkpoints.glob("*.json"))
    again = submit(*JOB, "--epochs", str(last + 2), directory=here)
    assert wait_for_end(again, here) == "COMPLETED"
    said = (here / f"digits-{again}.out").read_text()
    assert f"resumes after epoch {last}" in said
    assert f"epoch {last + 2:2}: loss" in said
