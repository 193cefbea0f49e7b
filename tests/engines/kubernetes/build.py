"""The programs of a Kubernetes cluster: Debian's packages, and binaries built from Go modules."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.engines import CACHE, EngineError
from tests.engines.versions import KUBERNETES
from tests.programs import run

PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)
#: What must be on PATH, and the Debian package that has it.
_TOOLS = {
    "conntrack": "conntrack",
    "containerd": "containerd",
    "dnsmasq": "dnsmasq-base",
    "etcd": "etcd-server",
    "ip": "iproute2",
    "iptables": "iptables",
    "openssl": "openssl",
    "runc": "runc",
    "tini": "tini",
    "unshare": "util-linux",
}
CNI = Path("/usr/lib/cni")
# The first process of each pod: it holds the pod's namespaces until it is told to end.
_PAUSE = """package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	<-signals
}
"""


def binaries() -> Path:
    """The folder of the binaries. Builds them if this version is not cached.

    Raises:
        EngineError: the cluster cannot be had on this machine.
    """
    if os.geteuid():
        raise EngineError("Kubernetes: only root may start containers and network namespaces")
    _install()
    folder = CACHE / f"kubernetes-{KUBERNETES}"
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # two sessions of tests build once
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [each for each in (*PROGRAMS, "pause") if not (folder / "bin" / each).exists()]
        if missing:
            _build(folder, missing)
    return folder / "bin"


def _install() -> None:
    """Install the Debian packages that this machine lacks."""
    packages = {name for tool, name in _TOOLS.items() if shutil.which(tool) is None}
    if not CNI.exists():
        packages.add("containernetworking-plugins")
    if not packages:
        return
    script = Path(__file__).parents[3] / ".ci" / "debian-packages"
    if (
        shutil.which("apt-get") is None
        or subprocess.run([script, *packages], check=False).returncode
    ):
        raise EngineError(f"Kubernetes: install the Debian packages {' '.join(sorted(packages))}")


def _build(folder: Path, programs: list[str]) -> None:
    go = shutil.which("go") or "/usr/local/go/bin/go"
    if not Path(go).exists():
        raise EngineError("Kubernetes: building its binaries needs Go 1.24 or later (go.dev/dl)")
    print(f"building {', '.join(programs)} {KUBERNETES}: minutes, once", flush=True)
    source = folder / "source"
    source.mkdir(exist_ok=True)
    if not (source / "go.mod").exists():
        _write_module(go, source)
    (source / "pause.go").write_text(_PAUSE)
    version = "k8s.io/component-base/version"
    major, minor, _ = KUBERNETES.split(".")
    flags = f"-s -w -X {version}.gitVersion=v{KUBERNETES}"
    flags += f" -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
    for name in programs:
        package = "./pause.go" if name == "pause" else f"k8s.io/kubernetes/cmd/{name}"
        partial = folder / f"{name}.partial"
        command = [go, "build", "-p", "1", "-mod=mod", "-ldflags", flags, "-o", str(partial)]
        _go([*command, package], source)
        partial.rename(folder / "bin" / name)


def _write_module(go: str, source: Path) -> None:
    """A module that requires Kubernetes.

    Its own libraries are folders of its repository, so a module that requires it has to name the
    releases of all of them.
    """
    name = f"k8s.io/kubernetes@v{KUBERNETES}"
    found = json.loads(_go([go, "mod", "download", "-json", name], source))
    staged = re.findall(
        r"^\s*(k8s\.io/[\w-]+) => \./staging", Path(found["GoMod"]).read_text(), re.MULTILINE
    )
    library = f"v0.{KUBERNETES.partition('.')[2]}"
    lines = ["module engines", "", "go 1.24.0", "", f"require k8s.io/kubernetes v{KUBERNETES}", ""]
    lines += [f"replace {each} => {each} {library}" for each in staged]
    (source / "go.mod").write_text("\n".join([*lines, ""]))


def _go(command: list[str], folder: Path) -> str:
    without_c = {"CGO_ENABLED": "0"}
    done = run("nice", "-n", 19, *command, cwd=folder, variables=without_c, timeout=None)
    if done.returncode:
        raise EngineError(f"Kubernetes: {' '.join(command)} failed: {done.stderr[-1000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(binaries())
    except EngineError as missing:
        sys.exit(str(missing))
