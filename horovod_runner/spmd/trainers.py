"""Chooses the ranks that train, their GPUs, and the network they use; pure functions.

One rank trains for each GPU of its host. Without GPUs all ranks train, or ``ranks_per_host`` of
each host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from horovod_runner.common.slots import Offer, Slot
from horovod_runner.driver import placement
from horovod_runner.errors import LaunchError


class Interface(msgspec.Struct, frozen=True):
    """A network interface of a host: its name, IPv4 address and netmask."""

    name: str
    address: str
    netmask: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The network that is reached through the interface."""
        return ipaddress.IPv4Network(f"{self.address}/{self.netmask}", strict=False)


class Participant(msgspec.Struct, frozen=True):
    """How a rank of the program describes itself to the others.

    Attributes:
        rank: its number in the program.
        host: as :attr:`horovod_runner.common.slots.Offer.host`.
        hostname: the host's name for people.
        gpus: the GPUs that the rank sees, in CUDA's order, by ids that are unique on the host.
        interfaces: the interfaces of its host, without loopback.
        chosen: the name of the interface to use (HOROVOD_GLOO_IFACE); empty if the user set none.
        default: the address of the host's default route; empty without one.
        problem: why the rank cannot take part; empty if it can.
    """

    rank: int
    host: str
    hostname: str
    gpus: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    chosen: str = ""
    default: str = ""
    problem: str = ""


decode_participant: Final = msgspec.msgpack.Decoder(Participant).decode


class Trainer(NamedTuple):
    """A rank of the program that trains.

    Attributes:
        rank: its number in the program.
        device: the index of its GPU among the GPUs that it sees; None on CPUs.
        slot: its place in Horovod.
    """

    rank: int
    device: int | None
    slot: Slot


def choose_trainers(
    participants: Sequence[Participant], ranks_per_host: int | None = None
) -> list[Trainer]:
    """Choose the ranks that train, in the order of their Horovod ranks.

    Raises:
        LaunchError: the hosts have no network in common.
    """
    devices = _devices(participants)
    use_gpus = any(device is not None for device in devices.values())
    chosen: list[Participant] = []
    on_host: dict[str, int] = {}
    for participant in participants:
        idle = use_gpus and devices[participant.rank] is None
        if idle or on_host.get(participant.host, 0) == (ranks_per_host or len(participants)):
            continue
        on_host[participant.host] = on_host.get(participant.host, 0) + 1
        chosen.append(participant)
    interfaces = _common_network(chosen)
    offers = [
        Offer(
            task=participant.rank,
            host=participant.host,
            hostname=participant.hostname,
            address=interfaces[participant.host].address,
            interface=interfaces[participant.host].name,
        )
        for participant in chosen
    ]
    slots = placement.assign(offers, gpus_per_rank=0)
    return [Trainer(slot.task, devices[slot.task], slot) for slot in slots]


def _devices(participants: Sequence[Participant]) -> dict[int, int | None]:
    """Assign to each rank the first GPU it sees that no earlier rank has; None if there is none."""
    taken: set[tuple[str, str]] = set()
    devices: dict[int, int | None] = {}
    for participant in participants:
        free = [i for i, gpu in enumerate(participant.gpus) if (participant.host, gpu) not in taken]
        devices[participant.rank] = free[0] if free else None
        if free:
            taken.add((participant.host, participant.gpus[free[0]]))
    return devices


LOOPBACK = Interface("lo", "127.0.0.1", "255.0.0.0")


def _common_network(participants: Sequence[Participant]) -> dict[str, Interface]:
    """Return the interface of each host by which it reaches the other hosts."""
    hosts = {participant.host: participant for participant in participants}
    if len(hosts) == 1:
        (only,) = hosts
        return {only: LOOPBACK}
    first = next(iter(hosts.values()))
    if all(participant.chosen for participant in hosts.values()):
        return {host: _chosen_interface(participant) for host, participant in hosts.items()}
    networks = [{i.network: i for i in reversed(each.interfaces)} for each in hosts.values()]
    for interface in first.interfaces:
        same = [known[interface.network] for known in networks if interface.network in known]
        # A bridge for containers has the same address on all hosts, and leads each to itself.
        if len({each.address for each in same}) == len(hosts):
            return dict(zip(hosts, same, strict=True))
    # Routed networks, where each host is in a different one.
    routed = {
        host: interface
        for host, participant in hosts.items()
        for interface in participant.interfaces
        if interface.address == participant.default
    }
    if len(routed) == len(hosts):
        return routed
    listed = "; ".join(
        f"{host.hostname}: {', '.join(f'{i.name} {i.address}' for i in host.interfaces)}"
        for host in hosts.values()
    )
    raise LaunchError(
        f"the {len(hosts)} hosts have no network in common ({listed}). Set HOROVOD_GLOO_IFACE on "
        "each host to the interface by which it reaches the others."
    )


def _chosen_interface(participant: Participant) -> Interface:
    for interface in participant.interfaces:
        if interface.name == participant.chosen:
            return interface
    names = ", ".join(interface.name for interface in participant.interfaces)
    raise LaunchError(
        f"HOROVOD_GLOO_IFACE={participant.chosen} is set on {participant.hostname}, which has no "
        f"such interface with an IPv4 address. Set it to one of: {names}."
    )


def address_towards(this: Participant, other: Participant) -> str:
    """Return the address by which a rank reaches another one."""
    return _common_network([other, this])[other.host].address
