"""Starts and ends the cluster, and talks to it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.engines import CACHE
from tests.engines.kubernetes.build import binaries
from tests.engines.kubernetes.daemons import CGROUP, NEEDS_NETWORK, READY, load_image, run
from tests.engines.kubernetes.image import write_image
from tests.engines.kubernetes.network import CLUSTER, INTERFACE, MACHINE, NODES, SERVICES, pods_of

ROOT = Path(__file__).parents[3]


class Cluster:
    """A cluster of two nodes; use it as a context.

    Args:
        folder: an empty folder on a disk. Its path should be short: sockets lie in it.

    Attributes:
        url: the API server's.
        kubeconfig: the administrator's file.
    """

    def __init__(self, folder: Path) -> None:
        self.url = f"https://{CLUSTER}:6443"
        self.folder = folder
        self.kubeconfig = folder / "admin.conf"
        self._bin = binaries()
        self._open = ExitStack()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster. The kernel ends it too if this process is killed."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            _remove_control_groups()
        self._open.close()

    def _start(self) -> None:
        # One at a time: they would have the same addresses.
        lock = self._open.enter_context((CACHE / "kubernetes.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_control_groups()  # of a cluster that was killed
        self._write_pause()
        command = ["unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
        command += ["--mount-proc", "tini", "-s", "--", sys.executable]
        command += ["-m", "tests.engines.kubernetes.daemons", str(self.folder)]
        errors = self.folder / "start.log"
        with errors.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for this process, which ends that one
            )
        self._expect(NEEDS_NETWORK, errors)
        self._connect(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._expect(READY, errors)

    def _expect(self, line: str, errors: Path) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != line:
            raise RuntimeError(f"the cluster does not start: {said}\n{errors.read_text()}")

    def _connect(self, pid: int) -> None:
        """Lay a cable between this machine and the cluster's network; it ends with the cluster."""
        with suppress(RuntimeError):  # the kernel removes the last one's in its own time
            run("ip", "link", "delete", INTERFACE)
        ends = ["type", "veth", "peer", "name", "eth0", "netns", str(pid)]
        run("ip", "link", "add", INTERFACE, *ends)
        run("ip", "address", "add", f"{MACHINE}/24", "dev", INTERFACE)
        run("ip", "link", "set", INTERFACE, "up")
        for subnet in (SERVICES, *map(pods_of, NODES)):
            run("ip", "route", "add", subnet, "via", CLUSTER)

    def _write_pause(self) -> None:
        root = self.folder / "pause"
        root.mkdir()
        shutil.copy(self._bin / "pause", root / "pause")
        write_image(self.folder / "pause.tar", "localhost/pause:1", root, ["/pause"])

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """Run kubectl as the administrator; returns its output.

        Raises:
            RuntimeError: it failed; has its message.
        """
        return run(*self.kubectl_line, *words, given=given)

    @property
    def kubectl_line(self) -> list[str]:
        """The command line of kubectl as the administrator."""
        return [str(self._bin / "kubectl"), f"--kubeconfig={self.kubeconfig}"]

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Create or change objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--filename=-", given=json.dumps(listed))

    def load(self, archive: Path, nodes: Iterable[str] = NODES) -> None:
        """Give an image to nodes, as a registry would."""
        for node in nodes:
            load_image(f"{self.folder}/{node}/containerd.sock", archive)

    def kubelet(self, node: str) -> psutil.Process:
        """A node's kubelet."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            if f"--hostname-override={node}" in process.cmdline() and "kubelet" in process.name():
                return process
        raise RuntimeError(f"{node} has no kubelet")

    def end_pods(self, node: str) -> None:
        """Kill all processes of a node's pods, as if its machine had lost power."""
        for root in _control_groups():
            _kill(root / node)

    def share(self, namespace: str, folders: Iterable[Path]) -> tuple[list[Any], list[Any]]:
        """Make folders of this machine mountable in a namespace.

        Under Pod Security "restricted" pods may mount claims, and no folders of their host.

        Returns:
            The volumes and the mounts of a pod that has these folders, read-only.
        """
        volumes, mounts = [], []
        for number, folder in enumerate(folders):
            name = f"{namespace}-{number}"
            storage = {"storage": "1Gi"}  # Kubernetes only compares the two
            shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": name}
            self.apply(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": name},
                    "spec": {
                        "accessModes": ["ReadOnlyMany"],
                        "capacity": storage,
                        "claimRef": {"name": name, "namespace": namespace},
                        "hostPath": {"path": str(folder), "type": "Directory"},
                    },
                },
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": name, "namespace": namespace},
                    "spec": {**shared, "resources": {"requests": storage}},
                },
            )
            claim = {"claimName": name, "readOnly": True}
            volumes.append({"name": f"shared-{number}", "persistentVolumeClaim": claim})
            mount = {"name": f"shared-{number}", "mountPath": str(folder), "readOnly": True}
            mounts.append(mount)
        bound = "--for=jsonpath={.status.phase}=Bound"
        self.kubectl(f"--namespace={namespace}", "wait", bound, "pvc", "--all", "--timeout=60s")
        return volumes, mounts


def _control_groups() -> list[Path]:
    """The nodes' control groups, of each controller in version 1."""
    root = Path("/sys/fs/cgroup")
    return [path for path in (root / CGROUP, *root.glob(f"*/{CGROUP}")) if path.exists()]


def _remove_control_groups() -> None:
    """Remove the nodes' control groups, with the processes of a cluster that was killed."""
    for root in _control_groups():
        _kill(root)
        for folder in sorted((Path(path) for path, _, _ in os.walk(root)), reverse=True):
            with suppress(OSError):  # the next cluster uses it again
                folder.rmdir()


def _kill(group: Path) -> None:
    """Kill the processes of a control group and of those below it."""
    for path, _, _ in os.walk(group):
        for pid in (Path(path) / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
