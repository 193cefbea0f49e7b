"""Which rank runs where: pure functions from what the tasks offer to every rank's slot.

Ranks that share a host are neighbours, as Horovod's local and cross communicators need; the order
of hosts is that of their lowest task, so task 0 always runs rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from horovod_runner.errors import GpuError, LaunchError

MANY: Final = 16  # ranks or hosts: of more, not each has a line of its own


class Offer(msgspec.Struct, frozen=True):
    """What one task (or one child of the local launcher) finds where it runs.

    Attributes:
        task: its number, 0 to size - 1.
        host: identifies the machine or container: equal for tasks that share memory and network.
        hostname: the host's name for people.
        address: the IPv4 address by which the host takes part in the job.
        interface: the network interface of that address.
        task_gpus: the GPUs that Spark gave to this task alone.
        host_gpus: the GPUs that this task can see on its host, given to no task.
        ports: how many the host has for who asks for any; 0 where it does not tell.
    """

    task: int
    host: str
    hostname: str
    address: str
    interface: str
    task_gpus: tuple[str, ...] = ()
    host_gpus: tuple[str, ...] = ()
    ports: int = 0


class Slot(msgspec.Struct, frozen=True):
    """Where one rank runs, in Horovod's terms.

    Attributes:
        gpus: this rank's own GPUs; empty on CPUs.
        host_gpus: the GPUs of all ranks of this host: first each rank's first one in local_rank
            order, so that Horovod's idiom ``devices[hvd.local_rank()]`` finds the rank's own.
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


def assign(offers: Iterable[Offer], gpus_per_rank: float | None = None) -> list[Slot]:
    """Give every task its rank and its GPUs.

    Args:
        offers: one for each task, in any order.
        gpus_per_rank: how many GPUs a rank gets; below 1 ranks share one, 0 hides all GPUs. None
            takes what Spark gave the task, else one each where the host has GPUs.

    Returns:
        The slots in rank order.

    Raises:
        GpuError: a host has too few GPUs, two ranks would share one unasked, or some hosts have
            GPUs and others have none.
        LaunchError: a host has an address that the others cannot reach.
    """
    hosts: dict[str, list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.task):
        hosts.setdefault(offer.host, []).append(offer)
    _refuse_loopback([local[0] for local in hosts.values()])
    gpus = {host: _share_gpus(local, gpus_per_rank) for host, local in hosts.items()}
    _refuse_mixed(hosts, gpus)
    size = sum(len(local) for local in hosts.values())
    slots: list[Slot] = []
    for host_index, local in enumerate(hosts.values()):
        for local_rank, offer in enumerate(local):
            # The hosts that have a rank with this local_rank form one cross communicator.
            peers = [i for i, other in enumerate(hosts.values()) if len(other) > local_rank]
            mine = gpus[offer.host]
            slots.append(
                Slot(
                    task=offer.task,
                    rank=len(slots),
                    size=size,
                    local_rank=local_rank,
                    local_size=len(local),
                    cross_rank=peers.index(host_index),
                    cross_size=len(peers),
                    host=offer.host,
                    hostname=offer.hostname,
                    address=offer.address,
                    interface=offer.interface,
                    gpus=mine[local_rank],
                    host_gpus=_first_of_each_first(mine),
                )
            )
    return slots


def short_of_ports(slots: Iterable[Slot], offers: Iterable[Offer]) -> list[str]:
    """The hosts that may have too few ports for Horovod's Gloo, a line each.

    Gloo connects each rank to each other one, and does so twice (for the process set of all ranks
    again) in three ways: among all ranks, those of a host, and those of one local_rank. For each
    of these pairs a rank listens on a port, and one of the two connects from another. On one host
    with Linux's default of 28,232 ports, 68 ranks met and 70 did not.
    """
    taken: dict[str, list[int]] = {}
    for slot in slots:
        peers = slot.size + slot.local_size + slot.cross_size - 3
        taken.setdefault(slot.host, []).append(3 * peers)
    there = {offer.host: offer for offer in offers}
    return [
        f"host {there[host].hostname} has {there[host].ports:,} ports to give "
        f"(net.ipv4.ip_local_port_range), and over Gloo its {len(each)} ranks take up to "
        f'{sum(each):,} while they connect: hvd.init() may end with "Address already in use". '
        "Take MPI (controller='mpi'), fewer ranks a host, or a wider range."
        for host, each in taken.items()
        if 0 < there[host].ports < sum(each)
    ]


def _refuse_loopback(hosts: Sequence[Offer]) -> None:
    """Refuse a host that the others cannot reach; each is given by one of its offers."""
    hidden = [offer for offer in hosts if offer.address.startswith("127.")]
    if hidden and len(hidden) < len(hosts):  # else all share one machine
        raise LaunchError(
            f"host {hidden[0].hostname} reaches the driver by its own loopback address, "
            f"{hidden[0].address}, where the ranks of {len(hosts) - 1} other host(s) cannot reach "
            "it: the driver runs there, and its name leads to itself. Set spark.driver.host to "
            "the driver's IPv4 address, or mend /etc/hosts there."
        )


def _share_gpus(local: Sequence[Offer], gpus_per_rank: float | None) -> list[tuple[str, ...]]:
    """The GPUs of each rank of one host, in local_rank order."""
    none: tuple[str, ...] = ()
    if gpus_per_rank == 0:
        return [none] * len(local)
    if any(offer.task_gpus for offer in local):
        given = [offer.task_gpus for offer in local]
    else:
        given = _deal(local, gpus_per_rank)
    _refuse_doubling(local, given, gpus_per_rank)
    return given


def _deal(local: Sequence[Offer], gpus_per_rank: float | None) -> list[tuple[str, ...]]:
    """Deal the host's visible GPUs out by local_rank."""
    devices = local[0].host_gpus
    if not devices and gpus_per_rank is None:
        return [()] * len(local)
    each = 1.0 if gpus_per_rank is None else gpus_per_rank
    needed = math.ceil(len(local) * each - 1e-9)
    if needed > len(devices):
        raise GpuError(
            f"host {local[0].hostname} has {len(devices)} GPU(s) and its {len(local)} ranks need "
            f"{needed} at gpus_per_rank={each:g}. Start fewer ranks on it, or set "
            "gpus_per_rank below 1 to share GPUs, or 0 to train on CPUs."
        )
    if each >= 1:
        return [devices[i * int(each) : (i + 1) * int(each)] for i in range(len(local))]
    return [(devices[int(i * each + 1e-9)],) for i in range(len(local))]


def _refuse_doubling(
    local: Sequence[Offer], given: Sequence[tuple[str, ...]], gpus_per_rank: float | None
) -> None:
    if gpus_per_rank is not None and gpus_per_rank < 1:
        return
    owner: dict[str, Offer] = {}
    for offer, gpus in zip(local, given, strict=True):
        if gpus_per_rank is not None and len(gpus) < gpus_per_rank:
            raise GpuError(
                f"Spark gave task {offer.task} on host {offer.hostname} {len(gpus)} GPU(s) and "
                f"gpus_per_rank={gpus_per_rank:g} asks for more: "
                "raise spark.task.resource.gpu.amount, or lower gpus_per_rank."
            )
        for gpu in gpus:
            other = owner.setdefault(gpu, offer)
            if other is not offer:
                raise GpuError(
                    f"tasks {other.task} and {offer.task} on host {offer.hostname} were both given "
                    f"GPU {gpu}. Give each executor GPUs of its own "
                    "(spark.worker.resource.gpu.discoveryScript), or set gpus_per_rank below 1 "
                    "if ranks are to share a GPU."
                )


def _refuse_mixed(hosts: dict[str, list[Offer]], gpus: dict[str, list[tuple[str, ...]]]) -> None:
    without = [hosts[host][0].hostname for host, given in gpus.items() if not all(given)]
    if without and any(any(given) for given in gpus.values()):
        raise GpuError(
            f"some ranks would train on GPUs and those on {', '.join(without)} on CPUs, which "
            "hangs at the first collective. Run on hosts of one kind, or set gpus_per_rank=0."
        )


def _first_of_each_first(gpus: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    firsts = [own[0] for own in gpus if own]
    others = [gpu for own in gpus for gpu in own[1:]]
    return tuple(dict.fromkeys([*firsts, *others]))


class RankInfo(NamedTuple):
    """A rank as ``runner.last_run.ranks`` shows it.

    Attributes:
        gpus: the GPUs that it was given.
        exit_code: its process's, negative for a signal; None while it runs, or where it was lost.
    """

    rank: int
    host: str
    pid: int | None
    gpus: tuple[str, ...]
    exit_code: int | None


def describe(slots: Sequence[Slot], pids: dict[int, int]) -> str:
    """The table rank -> host -> pid -> GPU; of more than 16 ranks a line a host, and not of all."""
    if len(slots) <= MANY:
        rows = [["rank", "host", "pid", "GPU"]]
        rows += [
            [str(s.rank), s.hostname, str(pids.get(s.rank, "-")), ",".join(s.gpus) or "-"]
            for s in slots
        ]
    else:
        rows = [["ranks", "host", "GPUs"]]
        hosts: dict[str, list[Slot]] = {}
        for slot in slots:
            hosts.setdefault(slot.host, []).append(slot)
        for local in islice(hosts.values(), MANY):
            span = f"{local[0].rank}-{local[-1].rank}" if len(local) > 1 else str(local[0].rank)
            rows.append([span, local[0].hostname, ",".join(local[0].host_gpus) or "-"])
        if len(hosts) > MANY:
            rows.append([f"to {len(slots) - 1}", f"on {len(hosts) - MANY} more hosts", ""])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines, the first column to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == 0 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people, with runs of neighbours drawn together: "ranks 1, 3-6"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """The same without the word."""
    groups: list[list[int]] = []
    for rank in sorted(ranks):
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)
