"""The environment variables of a worker, from its slot and assignment: pure functions.

`memory_variables` is an exception: it tries in the worker what this host allows.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.slots import Slot
from horovod_runner.host.python_path import without_spark_core
from horovod_runner.wire.messages import Assignment

# Read by Horovod with our patches (horovod_build).
NO_FINALIZE: Final = "HOROVOD_MPI_NO_FINALIZE"
WORLD_SIZE: Final = "HOROVOD_MPI_WORLD_SIZE"
_MANY_RANKS_PER_CORE = 16
# The user's function must not see secrets and ports of Spark and Py4J, and a run that a rank of
# another run starts must not connect to that run's ranks.
_WITHHELD: Final = (
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "PYSPARK_GATEWAY_PORT",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
)
# What other launchers tell the processes that they start: trainers in a rank (Lightning,
# Accelerate, DeepSpeed, JAX, TensorFlow, MPI itself) would take it for theirs.
_OF_LAUNCHERS: Final = (
    # torchrun; some trainers read the first three without it
    "NODE_RANK",
    "CROSS_RANK",
    "CROSS_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    # horovodrun, with ranks that come and go
    "HOROVOD_ELASTIC",
    # TensorFlow's own distribution, and Kubernetes operators that set it up
    "TF_CONFIG",
    # Cray
    "ALPS_APP_PE",
)
_OF_LAUNCHERS_BEGIN: Final = (
    "TORCHELASTIC_",
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    # MPI: Open MPI, MPICH and Intel MPI, MVAPICH. A rank's MPI gets its answers from the task
    # (mpi_socket.py); by a launcher's it would wait for that launcher's processes, or abort.
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "HYDI_",
    "HYDRA_",
    "MPIEXEC_",
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    # LSF with IBM's jsrun; Cray's PALS; Flux
    "LSB_",
    "JSM_",
    "PALS_",
    "FLUX_",
)
# How to reach Slurm, and a folder for temporary files. They describe no process.
_KEPT: Final = ("SLURM_CONF", "SLURM_TMPDIR")


def inherited_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that a process, by default this one, passes on to its workers."""
    withheld = {*_WITHHELD, *_OF_LAUNCHERS}
    variables = {
        name: value
        for name, value in (os.environ if given is None else given).items()
        if name in _KEPT or (name not in withheld and not name.startswith(_OF_LAUNCHERS_BEGIN))
    }
    if "PYTHONPATH" in variables:
        entries = variables["PYTHONPATH"].split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join(without_spark_core(entries))
    return variables


def horovod_variables(slot: Slot, assignment: Assignment) -> dict[str, str]:
    """The variables of ``hvd.init()`` (horovod 0.28.1, common/gloo/gloo_context.cc)."""
    variables = {
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_size,
        "HOROVOD_CROSS_RANK": slot.cross_rank,
        "HOROVOD_CROSS_SIZE": slot.cross_size,
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_CONTROLLER": assignment.controller,
        "HOROVOD_CPU_OPERATIONS": assignment.controller,
    }
    if assignment.controller == "mpi":
        variables |= {"PMI_RANK": slot.rank, "PMI_SIZE": slot.size}
        variables |= {NO_FINALIZE: 1, WORLD_SIZE: slot.size}
    if slot.size > 1:
        # Without an address Horovod assumes a single process.
        address, _, _token = assignment.rendezvous.partition("/")
        variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = assignment.rendezvous
        variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = address.rpartition(":")[2]
    return {name: str(value) for name, value in variables.items()}


def torch_distributed_variables(slot: Slot, assignment: Assignment) -> dict[str, str]:
    """The variables of ``torch.distributed.init_process_group()``: DDP code runs unchanged."""
    return {
        "MASTER_ADDR": assignment.master_address,
        "MASTER_PORT": str(assignment.master_port),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "GROUP_RANK": str(slot.cross_rank),
    }


def gloo_variables(slot: Slot, limits: Limits = DEFAULTS) -> dict[str, str]:
    """Bind Horovod's Gloo, NCCL and torch's Gloo to the job's network; and Gloo's timeout."""
    names = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    timeout = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(limits.gloo))}
    return dict.fromkeys(names, slot.interface) | timeout


def mpi_variables(interface: str) -> dict[str, str]:
    """Bind MPICH to the job's network, and turn off its signal handlers and warnings."""
    variables = {
        # faulthandler reports crashes.
        "UCX_ERROR_SIGNALS": "",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if not _has_rdma():  # with RDMA, UCX chooses the devices better itself
        variables["UCX_NET_DEVICES"] = interface
    return variables


def memory_variables() -> dict[str, str]:
    """Keep MPICH from reading the memory of other ranks, where that is forbidden.

    MPICH reads large messages from the sender's memory (process_vm_readv, "CMA"). Docker's default
    seccomp profile and other filters forbid it, and MPICH, which looks at Yama's ptrace_scope
    alone, then aborts in the first reduction of more than some kilobytes. A message is then copied
    through shared memory.
    """
    return {} if _can_read_memory() else {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}


class _IoVector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _can_read_memory() -> bool:
    """Whether this process may read its own memory by the system call, and that of its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return False
    source, target = ctypes.create_string_buffer(b"memory"), ctypes.create_string_buffer(7)
    into = _IoVector(ctypes.addressof(target), 7)

    def read(pid: int, address: int | None) -> int:
        there = _IoVector(address, 7)
        parts = ctypes.byref(into), 1, ctypes.byref(there), 1, 0
        return int(libc.process_vm_readv(pid, *parts))

    if read(os.getpid(), ctypes.addressof(source)) != 7 or target.raw != source.raw:
        return False
    # Address 0 is never valid: the system says so (EFAULT) where it allows reading at all. It does
    # not see a parent in another namespace (ESRCH).
    read(os.getppid(), None)
    return ctypes.get_errno() in (errno.EFAULT, errno.ESRCH)


def yield_variables(slot: Slot, cores: int) -> dict[str, str]:
    """Let ranks sleep while they wait inside MPICH, if very many of them share a core.

    By default MPICH calls sched_yield, after which Linux 6.6 and later often schedules another rank
    that waits too. Measured with 64 ranks on two cores: two of six ``hvd.init()`` took over 100 s;
    with these variables all take 4 to 7 s. The price, with four ranks on two cores: an allreduce of
    4 KB takes 1.0 ms instead of 0.3 ms.
    """
    if slot.local_size <= _MANY_RANKS_PER_CORE * cores:
        return {}
    return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "100"}


def _has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())


def cycle_variables(slot: Slot) -> dict[str, str]:
    """The poll interval of Horovod's background thread while no thread waits, in milliseconds.

    A thread that waits for a collective wakes it (our patches in horovod_build). On CPUs polling
    costs compute time: at 1 ms, Horovod's default, a tenth of a core per rank.
    """
    return {} if slot.gpus else {"HOROVOD_CYCLE_TIME": "20"}


def thread_variables(slot: Slot, cores: int) -> dict[str, str]:
    """A rank's share of the host's cores. By default every rank would use all of them.

    MKL and OpenBLAS follow OpenMP's variable. Their own variables are not set here: those would
    override a value that the user sets for OpenMP.
    """
    threads = str(max(1, cores // slot.local_size))
    return {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": threads,
    }


def worker_variables(
    slot: Slot,
    assignment: Assignment,
    cores: int,
    gpus: Mapping[str, str],
    user: Mapping[str, str],
    *,
    limits: Limits = DEFAULTS,
) -> dict[str, str]:
    """All variables of one rank's worker, on a host where the job may use so many cores.

    Those of the user override the defaults, but not the variables that identify the rank and its
    GPUs (see :func:`horovod_runner.host.gpus.environment`).
    """
    defaults = {
        **gloo_variables(slot, limits),
        **cycle_variables(slot),
        **thread_variables(slot, cores),
    }
    # The order of a set of texts is then the same on all ranks: vocabularies are made from sets.
    defaults["PYTHONHASHSEED"] = "0"
    # torch.distributed keeps its last collectives, for the profile of the run.
    defaults["TORCH_FR_BUFFER_SIZE"] = "512"
    if assignment.controller == "mpi":
        defaults |= mpi_variables(user.get("HOROVOD_GLOO_IFACE", slot.interface))
        defaults |= yield_variables(slot, cores)
    identity = {
        **horovod_variables(slot, assignment),
        **torch_distributed_variables(slot, assignment),
    }
    return {**defaults, **user, **gpus, **identity}
