"""The environment of a worker: pure functions from its slot to variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from horovod_runner.messages import Assignment
from horovod_runner.topology import Slot

# Gloo's limit for slow starts; also how long a dead peer may go unnoticed by the data plane.
_GLOO_TIMEOUT_SECONDS = 600
# Read by Horovod as horovod_source.py mends it.
NO_FINALIZE: Final = "HOROVOD_MPI_NO_FINALIZE"
WORLD_SIZE: Final = "HOROVOD_MPI_WORLD_SIZE"
_CROWD = 16  # ranks to a core


def horovod_variables(slot: Slot, assignment: Assignment) -> dict[str, str]:
    """What ``hvd.init()`` reads (horovod 0.28.1, common/gloo/gloo_context.cc)."""
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
        # Without an address Horovod takes itself for a single process.
        where, _, _token = assignment.rendezvous.partition("/")
        variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = assignment.rendezvous
        variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = where.rpartition(":")[2]
    return {name: str(value) for name, value in variables.items()}


def torch_distributed_variables(slot: Slot, assignment: Assignment) -> dict[str, str]:
    """What ``torch.distributed.init_process_group()`` reads, so that DDP code runs as it is."""
    return {
        "MASTER_ADDR": assignment.master_address,
        "MASTER_PORT": str(assignment.master_port),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "GROUP_RANK": str(slot.cross_rank),
    }


def interface_variables(slot: Slot) -> dict[str, str]:
    """Keep Horovod's Gloo, NCCL and torch's Gloo on the job's network interface."""
    names = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return dict.fromkeys(names, slot.interface)


def gloo_variables(slot: Slot) -> dict[str, str]:
    """The interface, and the time that a slow start may take."""
    return {
        **interface_variables(slot),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_GLOO_TIMEOUT_SECONDS),
    }


def mpi_variables(interface: str) -> dict[str, str]:
    """Keep MPICH on the job's network, and out of what others do better."""
    variables = {
        # A crash is for faulthandler to tell.
        "UCX_ERROR_SIGNALS": "",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if not _has_rdma():  # else it knows better
        variables["UCX_NET_DEVICES"] = interface
    return variables


def yield_variables(slot: Slot, cores: int) -> dict[str, str]:
    """Let very many ranks to a core give it up while they wait inside MPICH.

    By itself MPICH calls sched_yield, after which Linux since 6.6 often takes up one that waits as
    well: of six ``hvd.init()`` of 64 ranks on two cores two took over 100 s; so they take 4 to 7.
    With four ranks on two cores an allreduce of 4 KB takes 1.0 ms so instead of 0.3.
    """
    if slot.local_size <= _CROWD * cores:
        return {}
    return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "100"}


def _has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())


def cycle_variables(slot: Slot) -> dict[str, str]:
    """How often Horovod's background thread looks around where nobody waits for it; milliseconds.

    Who waits wakes it (horovod_source.py). On CPUs it takes from what computes: every millisecond,
    Horovod's own default, a tenth of a core from each rank.
    """
    return {} if slot.gpus else {"HOROVOD_CYCLE_TIME": "20"}


def thread_variables(slot: Slot, cores: int) -> dict[str, str]:
    """A rank's fair share of the host's cores; left alone, every rank takes all of them.

    MKL and OpenBLAS go by OpenMP's variable unless they have one of their own, which would win over
    what a user gives OpenMP.
    """
    threads = str(max(1, cores // slot.local_size))
    return {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": threads,
    }


def available_cores() -> int:
    """The cores that this process may use: its affinity, and its container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, min(cores, int(quota))) if quota else cores


def _cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU quota of this container, in cores; None without one."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    return int(limit) / int(period)


def worker_variables(
    slot: Slot,
    assignment: Assignment,
    cores: int,
    gpus: Mapping[str, str],
    user: Mapping[str, str],
) -> dict[str, str]:
    """All variables of one rank's worker.

    Args:
        slot: the rank's.
        assignment: the job's.
        cores: the cores of this host that the job may use.
        gpus: from :func:`horovod_runner.gpu.environment`.
        user: what the user set; wins over the defaults, but not over what makes a rank a rank, its
            GPUs included.
    """
    defaults = {**gloo_variables(slot), **cycle_variables(slot), **thread_variables(slot, cores)}
    if assignment.controller == "mpi":
        defaults |= mpi_variables(user.get("HOROVOD_GLOO_IFACE", slot.interface))
        defaults |= yield_variables(slot, cores)
    identity = {
        **horovod_variables(slot, assignment),
        **torch_distributed_variables(slot, assignment),
    }
    return {**defaults, **user, **gpus, **identity}
