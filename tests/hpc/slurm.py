"""Runs a real Slurm on this machine, from Debian's packages: munged, slurmctld and slurmd.

It requires root: munge checks the owner of its key, and slurmd starts tasks as any user.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.programs import free_ports, run

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_START_SECONDS = 180.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller.name}({controller.address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_NODE = "NodeName={node.name} NodeAddr={node.address} CPUs={cpus} State=UNKNOWN\n"


@dataclass(frozen=True)
class Node:
    """A machine: name, address, and the prefix of commands that run there."""

    name: str = socket.gethostname().split(".")[0]
    address: str = "127.0.0.1"
    enter: Sequence[str] = ()


def lacking() -> str:
    """Return why Slurm cannot run here; empty if it can."""
    if os.getuid() != 0:
        return "Slurm's daemons are started as root"
    missing = [name for name in COMMANDS if find(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def running(
    folder: Path,
    nodes: Sequence[Node] = (Node(),),
    controller: Node = Node(),
    cpus: int | None = None,
) -> Iterator[dict[str, str]]:
    """Run Slurm; yields the environment variables that its commands need.

    Args:
        folder: an empty one, for its state and its logs.
        nodes: where tasks run.
        controller: where slurmctld runs.
        cpus: how many each node says that it has; None for as many as there are.
    """
    controller_port, node_port = free_ports(2)  # Slurm does not accept port 0
    munge = folder / "munge"
    folders = [folder / f"{name}-{node.name}" for name in ("spool", "tmp") for node in nodes]
    for path in (munge, folder / "state", *folders):
        path.mkdir()
    for path in (folder, munge):
        path.chmod(0o755)
    configuration = folder / "slurm.conf"
    ports = {"controller_port": controller_port, "node_port": node_port}
    configuration.write_text(
        "".join(_NODE.format(node=node, cpus=cpus or os.cpu_count()) for node in nodes)
        + _CONFIGURATION.format(controller=controller, folder=folder, **ports)
    )
    environment = {"SLURM_CONF": str(configuration)}
    started: list[subprocess.Popen[bytes]] = []

    def start(node: Node, *command: str) -> None:
        with (folder / f"{command[0]}-{node.name}.out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    [*node.enter, find(command[0]) or command[0], *command[1:]],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    key = munge / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    try:
        start(
            Node(),
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge}/munge.socket",
            f"--pid-file={munge}/munged.pid",
            f"--log-file={munge}/munged.log",
            f"--seed-file={munge}/munged.seed",
        )
        _wait_for((munge / "munge.socket").exists, folder)
        start(controller, "slurmctld", "-D", "-c", "-f", str(configuration))
        for node in nodes:
            start(node, "slurmd", "-D", "-f", str(configuration), "-N", node.name)
        idle = "\n".join(["idle"] * len(nodes))
        _wait_for(lambda: _sinfo(environment, controller).strip() == idle, folder)
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _sinfo(environment: dict[str, str], controller: Node) -> str:
    words = ("sinfo", "--noheader", "--Node", "--format=%T")
    return run(*controller.enter, *words, variables=environment).stdout


def _wait_for(ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            logs = [
                f"--- {path}\n{path.read_text(errors='replace')[-2000:]}"
                for path in [
                    *folder.glob("*.log"),
                    *folder.glob("*.out"),
                    *folder.glob("munge/*.log"),
                ]
            ]
            raise RuntimeError("Slurm did not start:\n" + "\n".join(logs))
        time.sleep(0.2)


def allocate(environment: dict[str, str], tasks: int) -> dict[str, str]:
    """Get an allocation that lasts as long as Slurm; returns its environment variables."""
    words = ("salloc", "--no-shell", f"--ntasks={tasks}", "--overcommit")
    done = run(*words, variables=environment, check=True)
    match = re.search(r"job allocation (\d+)", done.stderr)
    assert match, done.stderr
    return {
        "SLURM_JOB_ID": match[1],
        "SLURM_NTASKS": str(tasks),
        "SLURM_OVERCOMMIT": "1",
        "SLURM_JOB_NODELIST": socket.gethostname().split(".")[0],
        "SLURM_JOB_NUM_NODES": "1",
    }
