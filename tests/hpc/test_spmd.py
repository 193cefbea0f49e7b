"""start, prepare_data and end under all launchers of programs; program.py makes the checks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.hpc import MPIRUN, PROGRAM, ROOT, require, require_mpi, start
from tests.preload import COMMAND, WARM

pytestmark = [pytest.mark.horovod]


def all_ok(done: subprocess.CompletedProcess[str]) -> bool:
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return all(f"rank {rank}: ok" in output for rank in range(4))


def test_under_mpirun_with_horovods_gloo() -> None:
    require_mpi()
    assert all_ok(start(*MPIRUN, sys.executable, PROGRAM))


def test_under_mpirun_with_horovod_over_mpi() -> None:
    require_mpi()
    python = ROOT / ".venv-openmpi" / "bin" / "python"
    require("" if python.exists() else "no Horovod built with the system's MPI")
    assert all_ok(start(*MPIRUN, str(python), PROGRAM, HOROVOD_CONTROLLER="mpi"))


# Slow: srun starts four ranks that import torch cold; there is no fork server.
def test_under_srun_with_pmix(allocation: None) -> None:
    done = start("srun", "--ntasks=4", "--mpi=pmix", sys.executable, PROGRAM)
    assert all_ok(done)


def test_the_error_for_srun_without_mpi_names_the_plugins(allocation: None) -> None:
    done = start("srun", "--ntasks=2", sys.executable, PROGRAM)
    assert done.returncode != 0
    assert "srun started 2 tasks without an MPI plugin" in done.stderr
    assert "--mpi=pmix" in done.stderr


def test_the_error_for_the_launcher_of_another_mpi_names_the_one_that_was_loaded() -> None:
    # mpi4py loads MPICH, and the variables are those of a launcher that is not MPICH's.
    done = start(sys.executable, PROGRAM, PMI_SIZE="4", PMI_RANK="1")
    assert done.returncode != 0
    assert "4 processes were started, but MPI sees only one" in done.stderr
    assert re.search(r"mpi4py loaded another MPI \(MPICH Version:\s+\d", done.stderr), done.stderr


def test_under_horovodrun() -> None:
    assert all_ok(start("horovodrun", "-np", "4", "--gloo", sys.executable, PROGRAM))


# Slow: four ranks go through all calls of spmd.
def test_under_horovod_runner() -> None:
    done = start(*WARM, COMMAND, "run", PROGRAM, "--np", "-4")
    assert all_ok(done)


def test_in_a_spark_barrier_task() -> None:
    code = f"""
import runpy, sys
from pyspark.sql import SparkSession

def task(rows):
    list(rows)
    sys.argv = [{PROGRAM!r}]
    runpy.run_path({PROGRAM!r}, run_name="__main__")
    yield 1

spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
print("tasks:", spark.sparkContext.parallelize(range(4), 4).barrier().mapPartitions(task).count())
"""
    done = start(sys.executable, "-c", code)
    assert "tasks: 4" in done.stdout, done.stderr
    assert all_ok(done)


def test_an_exception_of_one_rank_reaches_all() -> None:
    require_mpi()
    done = start(*MPIRUN, sys.executable, PROGRAM, "fail")
    assert done.returncode != 0
    assert done.stderr.count("RankFailedError: rank 1 of the program") == 3, done.stderr
    # Once in the traceback of the rank itself, and in those of the three others.
    assert done.stderr.count("ValueError: the error of rank 1") >= 4


def test_a_rank_that_exits_without_end_fails_the_others() -> None:
    require_mpi()
    done = start(*MPIRUN, sys.executable, PROGRAM, "exit")
    assert done.returncode != 0
    error = "the process exited (sys.exit, or the end of main) before spmd.end()"
    assert done.stderr.count(error) == 3


def test_an_idle_rank_that_fails_at_once_fails_the_others() -> None:
    require_mpi()
    # It may leave start() while the ranks that train are still in it.
    code = (
        "from horovod_runner import spmd; spmd.start('torch', ranks_per_host=2)\n"
        "if spmd.rank() == 3: raise ValueError('at once')\n"
        "spmd.end()"
    )
    done = start(*MPIRUN, sys.executable, "-c", code)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("RankFailedError: rank 3 of the program") == 3


def test_a_single_process_trains_alone() -> None:
    code = (
        "import numpy as np; from horovod_runner import spmd; spmd.start('tensorflow');"
        "import horovod.tensorflow as hvd; x = np.arange(3);"
        "assert (hvd.size(), spmd.initialized()) == (1, True);"
        "assert spmd.prepare_data(x) is x; spmd.end(); print('fine')"
    )
    done = start(sys.executable, "-c", code)
    assert done.stdout == "fine\n", done.stderr
