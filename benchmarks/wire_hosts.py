"""Hosts for wire.py: network namespaces with slow links between them, and a way to start ranks.

Every host has one link, with a rate in both directions:

- without a delay, the kernel shapes it: a pair of veth devices with `tc ... tbf` at both ends;
- with a delay, wire_switch.c does: the delay needs netem, which not every kernel has.

A host has its own ``/dev/shm``, but it sees the other hosts' processes, so MPI could read their
memory. With :data:`NO_SHORT_CUTS` among the ranks' variables everything takes the link.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.hosts.network import Host, missing

DEVICE = "eth0"
NO_SHORT_CUTS = {"UCX_TLS": "tcp,self"}
_HERE = Path(__file__).resolve().parent
_BURST, _QUEUE = "256kb", "4mb"
_SRUN = '''\
"""Starts tasks on the hosts of wire.py; takes the place of Slurm's srun."""

import json, os, signal, subprocess, sys

command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
parcel = sys.stdin.buffer.read()
tasks = [
    subprocess.Popen(
        [*enter, *command], stdin=subprocess.PIPE, env={**os.environ, "SLURM_PROCID": str(task)}
    )
    for task, enter in enumerate(json.loads(os.environ["WIRE_TASKS"]))
]
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
for task in tasks:
    task.stdin.write(parcel)
    task.stdin.close()
sys.exit(max(abs(task.wait()) for task in tasks))
'''


class Link(NamedTuple):
    """The link of every host.

    Attributes:
        rate: bits per second.
        delay: milliseconds from one host to another; 0 adds none.
    """

    rate: float
    delay: float

    def __str__(self) -> str:
        added = f", {self.delay:g} ms each way" if self.delay else ""
        return f"{self.rate / 1e9:g} Gbit/s{added}"


def obstacle(delays: bool) -> str:
    """Why there are no such hosts on this machine; empty if there are."""
    needed = ("cc",) if delays else ("tc",)
    absent = [tool for tool in needed if shutil.which(tool) is None]
    return f"no {absent[0]} on PATH" if absent else missing()


@contextmanager
def connected(folder: Path, count: int, link: Link) -> Iterator[list[Host]]:
    """Hosts that are connected by links.

    Args:
        folder: an empty one, for files.
        count: of the hosts.
        link: of each.
    """
    with ExitStack() as stack:
        hosts = []
        for number in range(1, count + 1):
            names = folder / f"host{number}.hosts"
            others = [f"{_address(other)} host{other}" for other in range(1, count + 1)]
            names.write_text("\n".join(["127.0.0.1 localhost", *others]) + "\n")
            hosts.append(Host(f"host{number}", names))
            stack.callback(hosts[-1].close)
        if link.delay:
            stack.enter_context(_switch(folder, hosts, link))
        else:
            names = folder / "switch.hosts"
            names.touch()
            bridge = Host("switch", names)
            stack.callback(bridge.close)
            _veth(bridge, hosts, link)
        for number, host in enumerate(hosts, 1):
            host.ip(f"address add {_address(number)}/24 dev {DEVICE}")
            host.ip(f"link set {DEVICE} up")
        yield hosts


def _address(number: int) -> str:
    return f"10.78.0.{number}"


def _run(host: Host, script: str) -> None:
    subprocess.run([*host.enter, "sh", "-ec", script], check=True)


def _veth(bridge: Host, hosts: Sequence[Host], link: Link) -> None:
    shape = f"root tbf rate {link.rate:.0f} burst {_BURST} limit {_QUEUE}"
    bridge.ip("link add br0 type bridge")
    bridge.ip("link set br0 up")
    for host in hosts:
        bridge.ip(f"link add name {host.name} type veth peer name {DEVICE} netns {host.pid}")
        bridge.ip(f"link set dev {host.name} master br0 up")
        _run(bridge, f"tc qdisc replace dev {host.name} {shape}")
        _run(host, f"tc qdisc replace dev {DEVICE} {shape}")


@contextmanager
def _switch(folder: Path, hosts: Sequence[Host], link: Link) -> Iterator[None]:
    program = folder / "wire_switch"
    subprocess.run(["cc", "-O2", "-o", program, _HERE / "wire_switch.c"], check=True)
    arguments = [f"{link.rate:.0f}", f"{link.delay * 1000:.0f}", *(str(host.pid) for host in hosts)]
    with subprocess.Popen(
        [program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("wire_switch could not be started")
        for number, host in enumerate(hosts, 1):
            host.ip(f"link set {DEVICE} address 02:00:00:00:00:{number:02x}")
        yield


def run(
    folder: Path,
    hosts: Sequence[Host],
    local_size: int,
    command: Sequence[str],
    arguments: dict[str, Any],
) -> Any:
    """Run a program on the first host, with an allocation of all hosts.

    Args:
        folder: for files.
        hosts: of the allocation.
        local_size: the ranks of each.
        command: an interpreter and a program, which uses ``ClusterConfig(launcher="slurm")``.
        arguments: what it gets as JSON after ``--job``.

    Returns:
        What it printed last, as JSON.
    """
    (folder / "bin").mkdir(exist_ok=True)
    srun = folder / "bin" / "srun"
    srun.write_text(f"#!{sys.executable}\n{_SRUN}")
    srun.chmod(0o755)
    tasks = [list(host.enter) for host in hosts for _ in range(local_size)]
    environment = {
        **os.environ,
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": str(len(tasks)),
        "SLURM_JOB_NODELIST": hosts[-1].name,
        "WIRE_TASKS": json.dumps(tasks),
    }
    done = subprocess.run(
        [*hosts[0].enter, *command, "--job", json.dumps(arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
