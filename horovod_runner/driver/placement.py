"""Assigns ranks to tasks: host, local rank and GPUs of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from horovod_runner.common.slots import Offer, Slot, ranks_per_gpu
from horovod_runner.common.text import MAX_LINES, align_columns, count_text, names_text, spans
from horovod_runner.errors import GpuError, LaunchError

_MAX_HOSTS: Final = 8  # in the table of many ranks


def assign(offers: Iterable[Offer], gpus_per_rank: float | None = None) -> list[Slot]:
    """Assign a rank and GPUs to every task; returns the slots in rank order.

    A rank gets ``gpus_per_rank`` GPUs; below 1 ranks share one, 0 hides all GPUs. None takes what
    Spark gave the task, or one each where the host has GPUs.

    Raises:
        GpuError: a host has too few GPUs, two ranks would share one although ``gpus_per_rank`` is
            not below 1, or some hosts have GPUs and others have none.
        LaunchError: a host has an address that the others cannot reach, or two have the same.
    """
    hosts: dict[str, list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.task):
        hosts.setdefault(offer.host, []).append(offer)
    first = [local[0] for local in hosts.values()]
    _refuse_loopback(first)
    _refuse_same_address(first)
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
    """Warnings for hosts that may have too few ports for Horovod's Gloo; equal hosts share one.

    Gloo connects each rank to each other one, and does so twice (for the process set of all ranks
    again) in three ways: among all ranks, those of a host, and those of one local_rank. For each
    of these pairs a rank listens on a port, and one of the two connects from another. On one host
    with Linux's default of 28,232 ports, 68 ranks met and 70 did not.
    """
    taken: dict[str, list[int]] = {}
    for slot in slots:
        peers = slot.size + slot.local_size + slot.cross_size - 3
        taken.setdefault(slot.host, []).append(3 * peers)
    by_host = {offer.host: offer for offer in offers}
    short: dict[tuple[int, int, int], list[str]] = {}
    for host, counts in taken.items():
        offer = by_host[host]
        if 0 < offer.ports < sum(counts):
            alike = (offer.ports, len(counts), sum(counts))
            short.setdefault(alike, []).append(offer.hostname)
    return [
        f"{names_text('host', names)} {'has' if len(names) == 1 else 'each have'} {ports:,} "
        f"ephemeral ports (net.ipv4.ip_local_port_range), and over Gloo {ranks} ranks take up to "
        f'{needed:,} while they connect: hvd.init() may fail with "Address already in use". '
        "Use MPI (cpu_collectives='mpi'), fewer ranks per host, or a wider range."
        for (ports, ranks, needed), names in short.items()
    ]


def _refuse_loopback(hosts: Sequence[Offer]) -> None:
    hidden = [offer for offer in hosts if offer.address.startswith("127.")]
    if hidden and len(hidden) < len(hosts):  # otherwise all share one machine
        raise LaunchError(
            f"host {hidden[0].hostname} reaches the driver by its own loopback address, "
            f"{hidden[0].address}, where the ranks of {len(hosts) - 1} other host(s) cannot reach "
            "it: the driver runs there, and its name resolves to the loopback address. Set "
            "spark.driver.host to the driver's IPv4 address, or correct /etc/hosts there."
        )


def _refuse_same_address(hosts: Sequence[Offer]) -> None:
    """Raise LaunchError where two machines have the same address, as behind NAT.

    Containers in the network of their machine are several hosts with one address, and usually one
    hostname; those reach each other.
    """
    owner: dict[str, Offer] = {}
    for offer in hosts:
        other = owner.setdefault(offer.address, offer)
        if other.hostname != offer.hostname and not offer.address.startswith("127."):
            raise LaunchError(
                f"hosts {other.hostname} and {offer.hostname} both have the address "
                f"{offer.address}, on {other.interface} and {offer.interface}, so they cannot "
                "reach each other by it: it belongs to a NAT or to a bridge for containers. Name "
                'the interface by which they do, env={"HOROVOD_GLOO_IFACE": "eth1"}.'
            )


def _share_gpus(local: Sequence[Offer], gpus_per_rank: float | None) -> list[tuple[str, ...]]:
    """The GPUs of each rank of one host, in local_rank order."""
    if gpus_per_rank == 0:
        return [()] * len(local)
    if any(offer.task_gpus for offer in local):
        given = [offer.task_gpus for offer in local]
    else:
        given = _deal(local, gpus_per_rank)
    _refuse_doubling(local, given, gpus_per_rank)
    return given


def _deal(local: Sequence[Offer], gpus_per_rank: float | None) -> list[tuple[str, ...]]:
    devices = local[0].host_gpus
    if not devices and gpus_per_rank is None:
        return [()] * len(local)
    per_rank = 1.0 if gpus_per_rank is None else gpus_per_rank
    share, each = ranks_per_gpu(per_rank), math.ceil(per_rank)
    needed = math.ceil(len(local) / share) * each
    if needed > len(devices):
        need = "needs" if len(local) == 1 else "need"
        sharing = "below 1 ranks share a GPU, " if per_rank >= 1 else ""
        raise GpuError(
            f"host {local[0].hostname} has {count_text(len(devices), 'GPU')}, and "
            f"{count_text(len(local), 'rank')} there {need} {needed} at gpus_per_rank="
            f"{per_rank:g}. Start fewer ranks on it, or lower gpus_per_rank: {sharing}at 0 they "
            "train on CPUs."
        )
    starts = [i // share * each for i in range(len(local))]
    return [devices[start : start + each] for start in starts]


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
            f"some ranks would train on GPUs and those on {names_text('host', without)} on CPUs, "
            "which hangs at the first collective. Run on hosts of one kind, or set gpus_per_rank=0."
        )


def _first_of_each_first(gpus: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """A host's GPUs, so that the one at index local_rank is that rank's first."""
    firsts = [of_rank[0] for of_rank in gpus if of_rank]
    others = [gpu for of_rank in gpus for gpu in of_rank[1:]]
    return tuple(dict.fromkeys([*firsts, *others]))


def describe(slots: Sequence[Slot], pids: dict[int, int]) -> str:
    """A table of the ranks: a line per rank; of more than 16, a line per host, for 8 hosts."""
    if len(slots) <= MAX_LINES:
        rows = [["rank", "host", "pid", "GPU"]]
        rows += [
            [str(s.rank), s.hostname, str(pids.get(s.rank, "-")), ",".join(s.gpus) or "-"]
            for s in slots
        ]
        return align_columns(rows)
    hosts: dict[str, list[Slot]] = {}
    for slot in slots:
        hosts.setdefault(slot.host, []).append(slot)
    of_hosts = list(hosts.values())
    rows = [_host_row(local) for local in of_hosts]
    if len(rows) > _MAX_HOSTS:
        left_out = of_hosts[_MAX_HOSTS - 1 : -1]
        others = [slot for local in left_out for slot in local]
        middle = [_span(others), f"{len(left_out)} more hosts", str(len(others)), "..."]
        rows = [*rows[: _MAX_HOSTS - 1], middle, rows[-1]]
    return align_columns([["ranks", "host", "count", "GPUs"], *rows])


def _host_row(local: Sequence[Slot]) -> list[str]:
    gpus = ",".join(local[0].host_gpus) or "-"
    return [_span(local), local[0].hostname, str(len(local)), gpus]


def _span(slots: Sequence[Slot]) -> str:
    return spans([slot.rank for slot in slots])
