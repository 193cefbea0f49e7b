"""Several hosts on one machine: network namespaces with hostnames, connected by a switch.

    driver  eth0 10.77.0.1  --+        +-- eth0 10.77.0.11 host-a
                              | switch |
    master  eth0 10.77.0.2  --+        +-- eth0 10.77.0.12 host-b

Each host has its own ``/dev/shm``, as hosts do. It also has what can mislead the choice of an
interface: ``docker0`` with the same address on all hosts, IPv6 beside IPv4, and a name that
resolves to 127.0.1.1 on the host itself, as on Debian. There may be a host-c and a host-d. host-a
and host-b have a second network, eth1, which the driver is not in. The host ipv6 has no IPv4
address but loopback's.

The namespaces have no names. They end with their last process, and the processes end with this one,
so nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil

from horovod_runner.host.processes import wait_for_end
from tests.programs import run

ADDRESSES = {
    "driver": "10.77.0.1",
    "master": "10.77.0.2",
    "host-a": "10.77.0.11",
    "host-b": "10.77.0.12",
    "host-c": "10.77.0.13",
    "host-d": "10.77.0.14",
}
SECOND = {"host-a": "10.88.0.11", "host-b": "10.88.0.12"}
NOWHERE = "10.99.0.1"  # each host's docker0, which leads to no other host
_TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
_NAMESPACES = ("--net", "--uts", "--mount")
# The host's first process reports that the host is set up, and waits for this process's end.
_INIT = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
kept=$(mktemp -d)
mount --rbind /sys/fs/cgroup "$kept"
mount -t sysfs sysfs /sys
mount --rbind "$kept" /sys/fs/cgroup
umount --lazy "$kept"
rmdir "$kept"
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec cat
"""


def missing() -> str:
    """Why such hosts are not possible on this machine; empty if they are."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} on PATH: install iproute2 and util-linux"
    tried = run("unshare", *_NAMESPACES, "sh", "-c", "mount -t sysfs sysfs /sys")
    if tried.returncode:
        return f"network namespaces are not allowed here (root may): {tried.stderr.strip()}"
    return ""


class Host:
    """A network namespace with a hostname and an ``/etc/hosts``.

    Args:
        name: its hostname.
        names: its ``/etc/hosts``.
    """

    def __init__(self, name: str, names: Path) -> None:
        self.name = name
        self.names = names
        self._init = subprocess.Popen(
            ["unshare", *_NAMESPACES, "sh", "-c", _INIT, "sh", name, str(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._init.pid
        assert self._init.stdout is not None
        if not self._init.stdout.readline():
            _, errors = self._init.communicate()
            raise RuntimeError(f"host {name} could not be set up: {errors}")
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/net")

    @property
    def enter(self) -> tuple[str, ...]:
        """The prefix that runs a command on this host, and ends it with the process that ran it."""
        nsenter = ("nsenter", f"--target={self.pid}", *_NAMESPACES, "--wd=.")
        return (*nsenter, "setpriv", "--pdeathsig=KILL")

    def ip(self, command: str) -> None:
        """Run ``ip`` on this host."""
        done = run(*self.enter, "ip", *command.split())
        if done.returncode:
            raise RuntimeError(f"ip {command} on {self.name}: {done.stderr.strip()}")

    @contextmanager
    def losing(self, address: str, ports: str, end: str = "dport") -> Iterator[None]:
        """Drop packets to an address, as a firewall does.

        Args:
            address: of another host.
            ports: a range of TCP ports.
            end: "dport" for ports of the other host, "sport" for ports of this one.
        """
        with self._rule(f"to {address} ipproto tcp {end} {ports} lookup 99 priority 200"):
            self.ip(f"route replace {address} dev docker0 table 99")
            self.ip(f"neighbour replace {address} lladdr 02:00:00:00:00:01 dev docker0")
            yield

    def answering(self, address: str, ports: str) -> AbstractContextManager[None]:
        """Drop nothing to an address that comes from these TCP ports of this host."""
        return self._rule(f"to {address} ipproto tcp sport {ports} lookup main priority 100")

    @contextmanager
    def _rule(self, rule: str) -> Iterator[None]:
        self.ip(f"rule add {rule}")
        try:
            yield
        finally:
            self.ip(f"rule del {rule}")

    def hide(self, folder: Path) -> None:
        """Give this host an empty folder of its own in place of one that all hosts see."""
        mount = [*self.enter, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)

    @contextmanager
    def nameless(self) -> Iterator[None]:
        """Let this host resolve no name but localhost, not even its own."""
        known = self.names.read_text()
        self.names.write_text("127.0.0.1 localhost\n::1 localhost\n")
        try:
            yield
        finally:
            self.names.write_text(known)

    def processes(self) -> list[psutil.Process]:
        """The processes on this host, without its first one."""
        processes = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                here = os.readlink(f"/proc/{process.pid}/ns/net") == self._namespace
                if here and process.pid != self.pid:
                    processes.append(process)
        return processes

    def close(self) -> None:
        """End all processes on this host, and the namespaces with them."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            wait_for_end(left, 1)
        self._init.communicate()


class Network:
    """The hosts and the switch between them; use it as a context.

    Args:
        folder: for the hosts' ``/etc/hosts``.
        workers: how many hosts there are beside driver and master: host-a, host-b and so on.
    """

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._names = list(ADDRESSES)[: workers + 2]
        self._all: list[Host] = []

    def __enter__(self) -> Network:
        try:
            self._switch = self._add("switch")
            self._switch.ip("link add br0 type bridge")
            self._switch.ip("link set br0 up")
            self.driver, self.master, *self.workers = map(self._plug_in, self._names)
            self.ipv6 = self._plug_in("ipv6")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts and all processes on them."""
        while self._all:
            self._all.pop().close()

    def _add(self, name: str) -> Host:
        names = self._folder / f"{name}.hosts"
        lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 {name}"]
        for other, address in ADDRESSES.items():
            if other != name:
                lines += [f"{_ipv6(address)} {other}", f"{address} {other}"]
        names.write_text("\n".join(lines) + "\n")
        self._all.append(Host(name, names))
        return self._all[-1]

    def _plug_in(self, name: str) -> Host:
        host = self._add(name)
        address = ADDRESSES.get(name)
        if address:
            host.ip("link add docker0 type bridge")
            host.ip(f"address add {NOWHERE}/24 dev docker0")
            host.ip("link set docker0 up")
        self._switch.ip(f"link add name {name} type veth peer name eth0 netns {host.pid}")
        self._switch.ip(f"link set dev {name} master br0 up")
        if address:
            host.ip(f"address add {address}/24 dev eth0")
        host.ip(f"address add {_ipv6(address or '99')}/64 dev eth0 nodad")
        host.ip("link set eth0 up")
        if name in SECOND:
            self._switch.ip(f"link add name {name}-2 type veth peer name eth1 netns {host.pid}")
            self._switch.ip(f"link set dev {name}-2 master br0 up")
            host.ip(f"address add {SECOND[name]}/24 dev eth1")
            host.ip("link set eth1 up")
        return host

    def unplug(self, host: Host) -> None:
        """Cut a host's cable at the switch: packets are lost without any notice."""
        self._switch.ip(f"link set dev {host.name} down")
        if host.name in SECOND:
            self._switch.ip(f"link set dev {host.name}-2 down")

    def plug(self, host: Host) -> None:
        """Mend a host's cable."""
        self._switch.ip(f"link set dev {host.name} up")


def _ipv6(address: str) -> str:
    return f"fd00:77::{address.rpartition('.')[2]}"
