"""Which of the ranks train, on which GPU, and over which network: pure functions.

One rank trains for each GPU of its host; without GPUs all do, or ``ranks_per_host`` of each host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from horovod_runner import topology
from horovod_runner.errors import LaunchError
from horovod_runner.topology import Offer, Slot


class Interface(msgspec.Struct, frozen=True):
    """A network interface of a host: its name, IPv4 address and netmask."""

    name: str
    address: str
    netmask: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The addresses that are reached through it."""
        return ipaddress.IPv4Network(f"{self.address}/{self.netmask}", strict=False)


class Member(msgspec.Struct, frozen=True):
    """What one rank of the program tells the others of itself.

    Attributes:
        rank: its number in the program.
        host: as :attr:`horovod_runner.topology.Offer.host`.
        hostname: the host's name for people.
        gpus: the GPUs that it sees, in CUDA's order, by names that hold on the whole host.
        interfaces: its host's, without loopback.
        chosen: the name of the one to take (HOROVOD_GLOO_IFACE); empty for none.
        default: the address of its default route; empty without one.
        problem: why this rank cannot take part; empty if it can.
    """

    rank: int
    host: str
    hostname: str
    gpus: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    chosen: str = ""
    default: str = ""
    problem: str = ""


class Trainer(NamedTuple):
    """A rank of the program that trains.

    Attributes:
        rank: its number in the program.
        device: the index of its GPU among those that it sees; None on CPUs.
        slot: what it is to Horovod.
    """

    rank: int
    device: int | None
    slot: Slot


def trainers(members: Sequence[Member], ranks_per_host: int | None = None) -> list[Trainer]:
    """Choose who trains.

    Args:
        members: all ranks of the program.
        ranks_per_host: train on at most so many ranks of each host.

    Returns:
        The trainers in the order of their Horovod ranks.

    Raises:
        LaunchError: their hosts have no network in common.
    """
    devices = _devices(members)
    use_gpus = any(device is not None for device in devices.values())
    chosen: list[Member] = []
    on_host: dict[str, int] = {}
    for member in members:
        idle = use_gpus and devices[member.rank] is None
        if idle or on_host.get(member.host, 0) == (ranks_per_host or len(members)):
            continue
        on_host[member.host] = on_host.get(member.host, 0) + 1
        chosen.append(member)
    meeting = _common_network(chosen)
    offers = [
        Offer(
            task=member.rank,
            host=member.host,
            hostname=member.hostname,
            address=meeting[member.host].address,
            interface=meeting[member.host].name,
        )
        for member in chosen
    ]
    slots = topology.assign(offers, gpus_per_rank=0)
    return [Trainer(slot.task, devices[slot.task], slot) for slot in slots]


def _devices(members: Sequence[Member]) -> dict[int, int | None]:
    """Give each rank the first of its GPUs that no rank before it has."""
    taken: set[tuple[str, str]] = set()
    found: dict[int, int | None] = {}
    for member in members:
        free = [i for i, gpu in enumerate(member.gpus) if (member.host, gpu) not in taken]
        found[member.rank] = free[0] if free else None
        if free:
            taken.add((member.host, member.gpus[free[0]]))
    return found


LOOPBACK = Interface("lo", "127.0.0.1", "255.0.0.0")


def _common_network(members: Sequence[Member]) -> dict[str, Interface]:
    """For each host the interface by which it takes part.

    Raises:
        LaunchError: there is none.
    """
    hosts = {member.host: member for member in members}
    if len(hosts) == 1:
        (only,) = hosts
        return {only: LOOPBACK}
    first = next(iter(hosts.values()))
    if all(member.chosen for member in hosts.values()):
        return {host: _named(member) for host, member in hosts.items()}
    for interface in first.interfaces:
        there = {host: _in_network(member, interface) for host, member in hosts.items()}
        met = {host: found for host, found in there.items() if found is not None}
        # A bridge for containers has one address on every host, and leads each to itself.
        if len(met) == len(hosts) == len({found.address for found in met.values()}):
            return met
    # Routed networks, where each host has one of its own.
    routed = {host: _with_address(member, member.default) for host, member in hosts.items()}
    found = {host: interface for host, interface in routed.items() if interface is not None}
    if len(found) == len(hosts):
        return found
    listed = "; ".join(
        f"{member.hostname}: {', '.join(f'{i.name} {i.address}' for i in member.interfaces)}"
        for member in hosts.values()
    )
    raise LaunchError(
        f"the {len(hosts)} hosts have no network in common ({listed}): set HOROVOD_GLOO_IFACE on "
        "each to the interface by which it reaches the others."
    )


def _named(member: Member) -> Interface:
    for interface in member.interfaces:
        if interface.name == member.chosen:
            return interface
    there = ", ".join(interface.name for interface in member.interfaces)
    raise LaunchError(
        f"HOROVOD_GLOO_IFACE={member.chosen} on {member.hostname}, which has no such interface "
        f"with an IPv4 address: {there}."
    )


def _in_network(member: Member, interface: Interface) -> Interface | None:
    for own in member.interfaces:
        if own.network == interface.network:
            return own
    return None


def _with_address(member: Member, address: str) -> Interface | None:
    return next((own for own in member.interfaces if own.address == address), None)


def address_towards(own: Member, other: Member) -> str:
    """The address by which a rank reaches another one.

    Raises:
        LaunchError: their hosts have no network in common.
    """
    return _common_network([other, own])[other.host].address


def shares(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut rows into consecutive parts that differ by one row at most: begin and end of each."""
    each, more = divmod(rows, parts)
    ends = [each * (part + 1) + min(part + 1, more) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
