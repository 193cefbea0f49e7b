"""How a host takes part in a job: its identity, its address and its network interface."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator

# Processes that differ in one of these share neither memory nor network devices.
_NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")


def host_id() -> str:
    """Names this host: equal for processes that share memory and network, no others.

    The hostname alone will not do: containers of one machine may share it, and clones of one image
    do. It becomes a part of Horovod's rendezvous paths: letters, digits, dots and dashes only.
    """
    name = socket.gethostname().split(".")[0]
    marks = [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id")]
    marks += [_link(f"/proc/self/ns/{namespace}") for namespace in _NAMESPACES]
    digest = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:8]
    return f"{''.join(c if c.isalnum() or c in '.-' else '-' for c in name)}-{digest}"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def address_towards(peer: str) -> str:
    """The IPv4 address from which this host reaches ``peer``; nothing is sent.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # any port: a datagram socket only looks the route up
        return str(probe.getsockname()[0])


def port_count() -> int:
    """How many ports the system has to give to who asks for any; 0 where it does not tell."""
    ends = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return int(ends[1]) - int(ends[0]) + 1 if len(ends) == 2 else 0


def is_own(name: str) -> bool:
    """Whether an IPv4 address, or a name of one, is this host's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            return False
    return True


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address.

    Raises:
        LookupError: none has it.
    """
    for name, own, _ in _ipv4():
        if own == address:
            return name
    raise LookupError(f"no network interface of this host has the address {address}")


def interfaces() -> list[tuple[str, str, str]]:
    """This host's network interfaces but loopback: name, IPv4 address and netmask of each."""
    return [each for each in _ipv4() if not each[1].startswith("127.")]


def _ipv4() -> Iterator[tuple[str, str, str]]:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                yield name, entry.address, entry.netmask or "255.255.255.255"


def default_address() -> str:
    """The address of the interface that leads to everywhere else; empty without one."""
    try:
        return address_towards("192.0.2.1")  # reserved for examples: it is looked up, not sent to
    except OSError:
        return ""


def hold_port(address: str) -> socket.socket:
    """Keep a free TCP port for a server that will start later, in another process.

    The socket is bound and does not listen. As it allows reuse, torch's store, which does so too,
    can bind the same port while nobody else is given it: no race between choosing and using.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held
