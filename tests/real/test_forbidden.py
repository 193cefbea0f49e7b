"""Ranks in containers, which may not read each other's memory or share it, reduce all the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.preload import TORCH

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(300)]
FORBIDDEN = (sys.executable, str(Path(__file__).with_name("forbidden.py")))
PROGRAM = f"""
import sys
from horovod_runner import ClusterConfig, HorovodRunner
from horovod_runner.tools.hello import hello

def main():
    import os

    return os.environ.get("MPIR_CVAR_CH4_CMA_ENABLE", "not set")

if __name__ == "__main__":
    env = dict(pair.split("=") for pair in sys.argv[1:])
    mpi = ClusterConfig(cpu_collectives="mpi", preload_frameworks={list(TORCH)!r})
    print("variable:", HorovodRunner(np=-2, env=env, cluster_config=mpi).run(main))
    if not env:
        print("sums:", [each.total for each in hello("torch", -2)])
"""


def run(path: Path, *command: str) -> str:
    program = path / "program.py"
    program.write_text(PROGRAM)
    done = programs.run(*(command[:2] or [sys.executable]), program, *command[2:])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_reduce_where_a_filter_forbids_to_read_memory(tmp_path: Path) -> None:
    shown = run(tmp_path, *FORBIDDEN)
    assert "variable: 0" in shown
    assert "sums: [3.0, 3.0]" in shown


def test_ranks_read_memory_where_that_is_allowed(tmp_path: Path) -> None:
    assert "variable: not set" in run(tmp_path)


def test_the_users_own_value_counts(tmp_path: Path) -> None:
    assert "variable: 1" in run(tmp_path, *FORBIDDEN, "MPIR_CVAR_CH4_CMA_ENABLE=1")


def test_doctor_names_the_size_of_the_message_that_fails() -> None:
    untried = {"MPIR_CVAR_CH4_CMA_ENABLE": "1"}  # as if nothing had been tried
    doctor = ("-m", "horovod_runner.tools.commands.cli", "doctor", "--json")
    done = programs.run(*FORBIDDEN, *doctor, variables=untried)
    assert done.returncode == 1
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    found = findings["two ranks with torch"]
    assert found["status"] == "wrong"
    assert found["detail"].startswith("failed when the ranks summed 64 KB: ")
    assert "process_vm_readv failed" in found["detail"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("ro", "cannot write to /dev/shm"),
        ("size=8m", "has 8.4 MB free in /dev/shm, and for 2 ranks the buffers of MPI take"),
    ],
)
def test_ranks_without_shared_memory_use_gloo(tmp_path: Path, option: str, told: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('cpu_collectives="mpi"', 'cpu_collectives="auto"'))
    mount = f'mount -t tmpfs -o {option} none /dev/shm && exec "$0" "$@"'
    done = programs.run("unshare", "--mount", "sh", "-c", mount, sys.executable, program)
    assert "sums: [3.0, 3.0]" in done.stdout, done.stderr
    assert told in done.stderr
