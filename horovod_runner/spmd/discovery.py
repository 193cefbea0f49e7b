"""Detects what started a program, describes this process, and connects to the other ranks.

Ranks that MPI started (``mpirun``, ``srun --mpi=...``) use MPI. Others meet at Horovod's rendezvous
server (``horovodrun``, HorovodRunner) or at Spark's barrier, and then use sockets.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from horovod_runner.errors import LaunchError
from horovod_runner.host import network
from horovod_runner.host.gpus import identified_gpus
from horovod_runner.spmd.mpi import MpiPeers
from horovod_runner.spmd.peers import Peers
from horovod_runner.spmd.session import Framework
from horovod_runner.spmd.trainers import Interface, Participant

# Variables that MPI launchers set to the number of processes.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
# Variables that they set to a process's rank.
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD", "MV2_COMM_WORLD_RANK")
# Prefixes of Open MPI's variables; MPICH does not use PMIx.
_OPEN_MPI = ("OMPI_COMM_WORLD_", "PMIX_")


def describe_this_rank(framework: Framework) -> Participant:
    """Return a description of this process; its rank is 0 until the ranks have met.

    GPUs are listed only if the framework is a CUDA build. An exception while looking for them
    becomes the participant's ``problem``.
    """
    gpus: tuple[str, ...] = ()
    problem = ""
    try:
        visible = identified_gpus()
        if visible and _is_cuda_build(framework):
            gpus = visible
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Participant(
        rank=0,
        host=network.host_id(),
        hostname=socket.gethostname(),
        gpus=gpus,
        interfaces=tuple(Interface(*interface) for interface in network.interfaces()),
        chosen=os.environ.get("HOROVOD_GLOO_IFACE", ""),
        default=network.default_address(),
        problem=problem,
    )


def _is_cuda_build(framework: Framework) -> bool:
    name = framework
    if framework == "keras":
        import keras

        name = keras.backend.backend()
    if name == "torch":
        import torch

        return torch.version.cuda is not None
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def find(this: Participant, comm: Any = None) -> Peers:
    """Connect to the ranks of an mpi4py communicator, or those that were started with this one.

    Raises:
        LaunchError: there are other ranks, and they cannot be reached.
    """
    if comm is not None:
        return MpiPeers(comm)
    from horovod_runner.spmd import meeting

    met: meeting.Meeting
    if _is_barrier_task():
        met = meeting.SparkMeeting()
    elif int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
        met = meeting.StoreMeeting()
    elif (
        "mpi4py.MPI" in sys.modules
        or any(os.environ.get(name) for name in _MPI_SIZES)
        or _slurm_tasks() > 1
    ):
        return _mpi()
    else:
        met = meeting.Alone()
    from horovod_runner.spmd.mesh import Mesh  # at first use: MPI needs no ZeroMQ

    return Mesh(met, this)


def _mpi() -> MpiPeers:
    tasks = _slurm_tasks()
    if tasks > 1 and not any(name in os.environ for name in _MPI_RANKS):
        # Otherwise Open MPI would end the process with a page of text.
        raise LaunchError(
            f"srun started {tasks} tasks without an MPI plugin, so they cannot find each other. "
            "Name the plugin of your MPI: srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH (srun "
            "--mpi=list shows them). Or start the program with `horovod-runner run`."
        )
    if any(name.startswith(_OPEN_MPI) for name in os.environ):
        # If the mpich package is installed as well, mpi4py would load that.
        os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"MPI or Slurm started this process as one of several, and mpi4py, which finds the "
            f"others, cannot be imported ({error}). pip install mpi4py, and put the MPI library on "
            "the loader's path. Or start the program with `horovod-runner run`."
        ) from error
    started = max([tasks, *(int(os.environ.get(name) or 1) for name in _MPI_SIZES)])
    if MPI.COMM_WORLD.size == 1 and started > 1:
        library = MPI.Get_library_version().splitlines()[0].strip("\0")
        raise LaunchError(
            f"{started} processes were started, but MPI sees only one: mpi4py loaded another MPI "
            f"({library}) than the one whose launcher was used. Use the mpirun of that MPI, or its "
            "plugin of srun (--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH). Or start the program "
            "with `horovod-runner run`."
        )
    return MpiPeers(MPI.COMM_WORLD)


def _slurm_tasks() -> int:
    """Return the number of tasks of this srun step; 1 outside a step, as in a batch script."""
    if "SLURM_PROCID" not in os.environ or not os.environ.get("SLURM_STEP_ID", "").isdigit():
        return 1
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def _is_barrier_task() -> bool:
    if "pyspark.taskcontext" not in sys.modules:
        return False
    from pyspark import BarrierTaskContext, TaskContext

    return isinstance(TaskContext.get(), BarrierTaskContext)
