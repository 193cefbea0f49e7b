"""Tests under a real Open MPI and a real Slurm, from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_runner.tools.horovod_build import toolchain
from tests.hpc import slurm
from tests.programs import ROOT, run

PROGRAM = str(ROOT / "tests" / "hpc" / "program.py")
# Not the mpirun of the mpich package, which is among the scripts of this environment.
_MPIRUN = shutil.which("mpirun", path=toolchain.tool_path(scripts_first=False))
OPEN_MPI = _MPIRUN if _MPIRUN and Path(_MPIRUN).parent != Path(sys.executable).parent else None
MPIRUN = (OPEN_MPI or "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4")


def require(missing: str) -> None:
    """Skip a test whose requirement is missing; fail if CI is set."""
    if missing and os.environ.get("CI"):
        pytest.fail(f"{missing}: make packages")
    if missing:
        pytest.skip(f"{missing}: make packages")


def require_mpi() -> None:
    require("" if OPEN_MPI else "not installed: Open MPI")


def require_slurm() -> None:
    require(slurm.lacking())


def start(
    *command: str, directory: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with this environment's scripts in PATH, and wait for its end."""
    scripts = str(Path(sys.executable).parent)
    path = f"{scripts}:{os.environ['PATH']}:/usr/sbin"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), **environment}
    return run(*command, cwd=directory, variables=variables)
