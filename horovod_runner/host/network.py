"""The identity, the IPv4 addresses and the network interfaces of this host."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator

from horovod_runner.errors import LaunchError

# Processes that differ in one of these share neither memory nor network devices.
_NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")


def host_id() -> str:
    """An id of this host, equal only for processes that share memory and network.

    The hostname is not enough: containers of one machine may share it, and clones of one image do.
    The id becomes a part of Horovod's rendezvous paths: letters, digits, dots and dashes only.
    """
    name = socket.gethostname().split(".")[0]
    parts = [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id")]
    parts += [_link(f"/proc/self/ns/{namespace}") for namespace in _NAMESPACES]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
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
    """Look up the IPv4 address from which this host reaches ``peer``, or raise an OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # any port: for a datagram socket this only looks up the route
        return str(probe.getsockname()[0])


def port_count() -> int:
    """The number of ephemeral TCP ports; 0 where the system does not tell."""
    ends = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return int(ends[1]) - int(ends[0]) + 1 if len(ends) == 2 else 0


def is_local(name: str) -> bool:
    """Whether an IPv4 address, or a hostname that resolves to one, belongs to this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            return False
    return True


def interface_of(address: str) -> str:
    """Find the network interface that has an IPv4 address, or raise a LookupError."""
    for name, its_address, _ in _ipv4():
        if its_address == address:
            return name
    raise LookupError(f"no network interface of this host has the address {address}")


def interfaces() -> list[tuple[str, str, str]]:
    """This host's network interfaces, without loopback: (name, IPv4 address, netmask) of each."""
    return [entry for entry in _ipv4() if not entry[1].startswith("127.")]


def _ipv4() -> Iterator[tuple[str, str, str]]:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                yield name, entry.address, entry.netmask or "255.255.255.255"


def address_of(interface: str) -> str:
    """Find the IPv4 address of a network interface, or raise a LaunchError."""
    for name, address, _ in _ipv4():
        if name == interface:
            return address
    names = ", ".join(name for name, _, _ in interfaces()) or "none"
    raise LaunchError(
        f"HOROVOD_GLOO_IFACE={interface}: host {socket.gethostname()} has no such network "
        f"interface with an IPv4 address. It has: {names}."
    )


def default_address() -> str:
    """The IPv4 address of the interface of the default route; empty without one."""
    try:
        return address_towards("192.0.2.1")  # reserved for examples; nothing is sent there
    except OSError:
        return ""


def hold_port() -> socket.socket:
    """Reserve a free TCP port for a server that will start later, in another process.

    The socket is bound but does not listen, and allows reuse. torch's TCPStore, which allows reuse
    too, can bind the same port, while the system gives it to nobody else: there is no race between
    choosing the port and using it. It is bound to all addresses, because the store listens on all:
    a port of one address may still be given to a server on another.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
