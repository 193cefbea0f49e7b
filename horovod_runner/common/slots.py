"""Where ranks run: what each task offers, and the slot that `driver.placement` gives a rank."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

#: What Horovod calls the library that coordinates its CPU collectives.
Controller = Literal["gloo", "mpi"]


def ranks_per_gpu(gpus_per_rank: float) -> int:
    """How many ranks, or Spark's tasks, share a GPU; as Spark counts them."""
    return 1 if gpus_per_rank >= 1 else int(1 / gpus_per_rank)


class Offer(msgspec.Struct, frozen=True):
    """The host, network and GPUs of one task (or of one rank of the local launcher).

    Attributes:
        task: its number, 0 to size - 1.
        host: identifies the machine or container; equal for tasks that share memory and network.
        hostname: the host's name for people.
        address: the host's IPv4 address in the job.
        interface: the network interface of that address.
        task_gpus: the GPUs that Spark gave to this task.
        host_gpus: the GPUs of the host that this task can see and that belong to no task.
        ports: the number of ephemeral TCP ports on the host; 0 where the system does not tell.
        shared_memory: the free bytes in /dev/shm; -1 where the system does not tell.
    """

    task: int
    host: str
    hostname: str
    address: str
    interface: str
    task_gpus: tuple[str, ...] = ()
    host_gpus: tuple[str, ...] = ()
    ports: int = 0
    shared_memory: int = -1


class Slot(msgspec.Struct, frozen=True):
    """Where one rank runs, in Horovod's terms.

    Ranks that share a host have neighbouring numbers: Horovod's local and cross communicators need
    that. Hosts are ordered by their lowest task, so task 0 always runs rank 0.

    Attributes:
        gpus: this rank's GPUs; empty on CPUs.
        host_gpus: the GPUs of all ranks of this host. The first GPU of each rank comes first, in
            local_rank order: Horovod's idiom ``devices[hvd.local_rank()]`` finds the rank's GPU.
    """

    task: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    hostname: str
    address: str
    interface: str
    gpus: tuple[str, ...] = ()
    host_gpus: tuple[str, ...] = ()


class RankInfo(NamedTuple):
    """A rank in ``runner.last_run.ranks``.

    Attributes:
        gpus: the GPUs that it was given.
        exit_code: of its process, negative for a signal; None while it runs, or if it was lost.
    """

    rank: int
    host: str
    pid: int | None
    gpus: tuple[str, ...]
    exit_code: int | None
