"""Finds the other ranks of a program, whatever has started it.

Where an MPI has (``mpirun``, ``srun --mpi=...``) by MPI itself. Else they meet where they can, at
Horovod's rendezvous store (``horovodrun``, HorovodRunner) or by Spark's barrier, and then talk over
sockets of their own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from horovod_runner.errors import LaunchError
from horovod_runner.spmd.neighbours import Neighbours
from horovod_runner.spmd.placement import Member

# What an MPI's launcher sets in each process that it starts: how many there are.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")

# And who it is.
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD", "MV2_COMM_WORLD_RANK")
# What Open MPI's launchers set; MPICH knows nothing of PMIx.
_OPEN_MPI = ("OMPI_COMM_WORLD_", "PMIX_")


def find(own: Member, comm: Any = None) -> Neighbours:
    """The ranks that this process was started with.

    Args:
        own: this process; its rank is not known yet.
        comm: an mpi4py communicator to take instead of looking.

    Raises:
        LaunchError: there are others, and no way to reach them.
    """
    if comm is not None:
        from horovod_runner.spmd.mpi import MpiNeighbours

        return MpiNeighbours(comm)
    if _is_barrier_task():
        from horovod_runner.spmd.mesh import Mesh, SparkMeeting

        return Mesh(SparkMeeting(), own)
    if int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
        from horovod_runner.spmd.mesh import Mesh, StoreMeeting

        return Mesh(StoreMeeting(), own)
    if "mpi4py.MPI" in sys.modules or any(os.environ.get(name) for name in _MPI_SIZES):
        return _mpi()
    if _slurm_tasks() > 1:
        return _mpi()
    from horovod_runner.spmd.mesh import Alone, Mesh

    return Mesh(Alone(), own)


def _mpi() -> Neighbours:
    tasks = _slurm_tasks()
    if tasks > 1 and not any(name in os.environ for name in _MPI_RANKS):
        # An Open MPI would end the process with a page of text.
        raise LaunchError(
            f"srun started {tasks} tasks, and no MPI by which they know of each other: name the "
            "plugin that fits the MPI, srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH (srun "
            "--mpi=list shows them); or start the program with `horovod-runner run`."
        )
    if any(name.startswith(_OPEN_MPI) for name in os.environ):
        # Where the mpich package is installed too, mpi4py would take that.
        os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"an MPI or Slurm started this process as one of several, and mpi4py, which tells of "
            f"the others, cannot be imported ({error}): pip install mpi4py, with the MPI's "
            "library on the loader's path; or start the program with `horovod-runner run`."
        ) from error
    from horovod_runner.spmd.mpi import MpiNeighbours

    started = max([tasks, *(int(os.environ.get(name) or 1) for name in _MPI_SIZES)])
    if MPI.COMM_WORLD.size == 1 and started > 1:
        library = MPI.Get_library_version().splitlines()[0].strip("\0")
        raise LaunchError(
            f"{started} processes were started and MPI knows of one: the MPI that mpi4py found "
            f"({library}) is not the one whose launcher was used. Use its own mpirun (or the "
            "plugin of srun that fits it: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH), or "
            "start the program with `horovod-runner run`."
        )
    return MpiNeighbours(MPI.COMM_WORLD)


def _slurm_tasks() -> int:
    """How many tasks srun started this process with; 1 outside one (in a batch script, say)."""
    if "SLURM_PROCID" not in os.environ or not os.environ.get("SLURM_STEP_ID", "").isdigit():
        return 1
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def _is_barrier_task() -> bool:
    if "pyspark.taskcontext" not in sys.modules:
        return False
    from pyspark import BarrierTaskContext, TaskContext

    return isinstance(TaskContext.get(), BarrierTaskContext)
