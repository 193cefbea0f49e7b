"""Bodo's deep-learning API: a program with ``bodo.jit`` and MPI, of whose ranks some train."""

from __future__ import annotations

import os

import pytest

from tests.hpc import require
from tests.programs import ROOT, run

pytestmark = [pytest.mark.horovod]
SCRIPTS = ROOT / ".venv-bodo" / "bin"


# Slow: four processes import Bodo, which compiles what it runs.
def test_arrays_that_bodo_made_train_on_two_of_four_ranks() -> None:
    require(
        "" if (SCRIPTS / "mpiexec").exists() else "not installed: Bodo (make .venv-bodo/.ready)"
    )
    # Not this environment's: Bodo brings an MPI of its own, and another pandas.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = (SCRIPTS / "python", "tests/stories/bodo_program.py")
    done = run(SCRIPTS / "mpiexec", "-n", 4, *program, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank}: weights [3.0, 3.0, 0.0, 0.0]" in done.stdout
