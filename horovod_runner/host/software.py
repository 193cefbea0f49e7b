"""Compares the versions of Python packages on the driver and on the ranks' hosts."""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from horovod_runner.common.options import CpuCollectives
from horovod_runner.common.slots import Controller
from horovod_runner.common.text import count_text, names_text, sizes_text
from horovod_runner.errors import LaunchError

_FRAMEWORKS = ("horovod", "torch", "tensorflow", "keras")
_PACKAGES = frozenset((*_FRAMEWORKS, "cloudpickle", "numpy", "horovod_runner"))
# The wheel that Horovod is built with for MPI; such a Horovod requires it.
_MPICH = "mpich"
# Set on hosts where MPICH has no place for its buffers: there it ends hvd.init() with an abort.
_NO_SHARED_MEMORY = "no_shared_memory"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where MPICH makes them
# The size of MPICH's buffers for a rank: 5.4 MB with 2 to 16 ranks on a host. With less room it
# ends hvd.init() with SIGBUS.
_BYTES_OF_A_RANK = 6_000_000
# Set on hosts whose Horovod for torch was built without NCCL.
_NO_NCCL = "no_nccl"
# A name that is only in libraries that were linked with NCCL, statically or dynamically.
_OF_NCCL = b"ncclCommInitRank"
# Names in the pickle of a main that reduces with Horovod for torch.
_REDUCES_BY_HOROVOD = re.compile(
    rb"\bhorovod\.torch|horovod_runner\.integrations\.(loops|training\.(torch|lightning))"
)
_DIST_INFO = re.compile(r"(?P<name>[\w.]+)-(?P<version>[^-]+)\.dist-info$")
_ALIASES = {"tensorflow_cpu": "tensorflow", "tensorflow_gpu": "tensorflow"}

Software = Mapping[str, str]
_UNKNOWN: Mapping[str, SharedMemory] = {}


def installed(path: Sequence[str] = ()) -> dict[str, str]:
    """The versions of Python and of the packages that matter here, in some folders or ``sys.path``.

    They are read from the names of folders: importlib.metadata takes far longer.
    """
    versions = {"python": platform.python_version()}
    mpich, built, nccl = "", False, True
    for entry in path or sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            match = _DIST_INFO.match(name)
            if match:
                package = match["name"].lower()
                package = _ALIASES.get(package, package)
                if package == "horovod" and package not in versions:
                    built = _requires_mpich(os.path.join(entry, name))
                    nccl = _has_nccl(os.path.join(entry, "horovod", "torch"))
                if package in _PACKAGES:
                    versions.setdefault(package, match["version"])
                elif package == _MPICH:
                    mpich = mpich or match["version"]
    if built and mpich:
        versions[_MPICH] = mpich
    if not nccl:
        versions[_NO_NCCL] = "horovod.torch"
    if not os.access(_SHARED_MEMORY, os.W_OK):
        versions[_NO_SHARED_MEMORY] = _SHARED_MEMORY
    return versions


def _requires_mpich(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "METADATA"), encoding="utf-8") as file:
            return f"\nRequires-Dist: {_MPICH}" in file.read()
    except OSError:
        return False


def _has_nccl(folder: str) -> bool:
    """Whether Horovod's library for torch was built with NCCL; True where there is none."""
    libraries = glob.glob(os.path.join(glob.escape(folder), "mpi_lib*.so"))
    for library in libraries:
        with suppress(OSError):
            if _OF_NCCL not in Path(library).read_bytes():
                return False
    return True


class SharedMemory(NamedTuple):
    """The shared memory of a host.

    Attributes:
        free: bytes in /dev/shm; below 0 where the host does not tell.
    """

    free: int
    ranks: int

    @property
    def short(self) -> bool:
        """Whether MPI's buffers have too little room."""
        return 0 <= self.free < self.ranks * _BYTES_OF_A_RANK


def choose_controller(
    wanted: CpuCollectives,
    hosts: Mapping[str, Software],
    memory: Mapping[str, SharedMemory] = _UNKNOWN,
) -> tuple[Controller, str]:
    """Choose the library for CPU collectives; also returns a line that explains the choice.

    The versions and the shared memory are those of each host, by hostname.

    Raises:
        LaunchError: MPI is wanted, and a host lacks it or has another version.
    """
    if wanted == "gloo":
        return "gloo", "controller: Gloo (cpu_collectives='gloo')"
    versions = {on_host.get(_MPICH, ""): host for host, on_host in hosts.items()}
    without = [host for host, on_host in hosts.items() if _NO_SHARED_MEMORY in on_host]
    short = {host: each for host, each in memory.items() if each.short}
    if len(versions) == 1 and "" not in versions and not without and not short:
        return "mpi", f"controller: MPI (MPICH {next(iter(versions))})"
    remedy = "pip install mpich, then horovod-runner install"
    if without:
        why = (
            f"{names_text('host', without)} cannot write to {_SHARED_MEMORY}, where MPI has its "
            "buffers: start containers with --shm-size, and without --ipc none"
        )
    elif short and "" not in versions and len(versions) == 1:
        host, found = next(iter(short.items()))
        free, needed = sizes_text(found.free, found.ranks * _BYTES_OF_A_RANK)
        why = (
            f"host {host} has {free} free in {_SHARED_MEMORY}, and for "
            f"{count_text(found.ranks, 'rank')} the buffers of MPI take up to {needed}: free "
            "memory there, or start containers with a larger --shm-size"
        )
    elif "" in versions:
        why = f"the Horovod of {versions['']} was not built with the mpich package: {remedy}"
    else:
        listed = ", ".join(f"{version} on {host}" for version, host in versions.items())
        why = f"the hosts have different versions of mpich ({listed}): {remedy} on each"
    if wanted == "mpi":
        raise LaunchError(
            f"cpu_collectives='mpi' is not possible: {why}. Or leave cpu_collectives out."
        )
    return "gloo", f"controller: Gloo; {why}. MPI reduces several times as fast on CPUs"


def without_nccl(hosts: Mapping[str, Software], main: bytes) -> list[str]:
    """The hosts on whose GPUs main, which is pickled, would be aborted at its first collective.

    One that reduces with torch.distributed alone needs no Horovod.
    """
    if not _REDUCES_BY_HOROVOD.search(main):
        return []
    return [host for host, on_host in hosts.items() if _NO_NCCL in on_host]


def compare(driver: Software, hosts: Mapping[str, Software], main: bytes) -> list[str]:
    """Warn about versions that may not work together; hosts with the same problem share a line.

    The hosts' versions are by hostname; empty ones are skipped. ``main`` is pickled, and contains
    the names of the modules that it imports.

    Raises:
        LaunchError: the versions of Python, horovod_runner or horovod cannot work together.
    """
    problems: dict[tuple[str, str], list[str]] = {}  # hosts by what they have, and the remedy
    for host, on_host in hosts.items():
        if not on_host:
            continue
        _refuse(host, on_host, driver)
        for package in _FRAMEWORKS:
            if package in driver and package not in on_host and package.encode() in main:
                remedy = (
                    "horovod-runner install"
                    if package == "horovod"
                    else f"pip install {package}=={driver[package].partition('+')[0]}"
                )
                text = f", which main seems to use: run there: {remedy}"
                problems.setdefault((f"no {package}", text), []).append(host)
        # Pickled arrays and functions of a later major version do not load in an earlier one.
        for package in ("cloudpickle", "numpy"):
            if _major(on_host, package) != _major(driver, package):
                text = (
                    f" and the driver has {_version(driver, package)}: objects pickled by one may "
                    "not load in the other. Install the same major version."
                )
                problems.setdefault((_version(on_host, package), text), []).append(host)
    warnings = [
        f"{names_text('host', names)} {'has' if len(names) == 1 else 'have'} {what}{text}"
        for (what, text), names in problems.items()
    ]
    for package in _FRAMEWORKS:
        versions = {on_host[package]: host for host, on_host in hosts.items() if package in on_host}
        if len(versions) > 1 and package.encode() in main:
            listed = ", ".join(f"{version} on {host}" for version, host in versions.items())
            if package == "horovod":
                raise LaunchError(
                    f"the ranks' hosts have different versions of horovod: {listed}. Their "
                    "protocols differ: run horovod-runner install on each host."
                )
            warnings.append(f"the ranks' hosts have different versions of {package}: {listed}")
    return warnings


def _refuse(host: str, on_host: Software, driver: Software) -> None:
    python = on_host.get("python", driver["python"])
    if _minor(python) != _minor(driver["python"]):
        raise LaunchError(
            f"host {host} runs Python {python} and the driver {driver['python']}: a function "
            "pickled by one minor version does not load in another. Set spark.pyspark.python (or "
            f"PYSPARK_PYTHON) to a Python {_minor(driver['python'])} on every host."
        )
    here, there = driver.get("horovod_runner"), on_host.get("horovod_runner")
    if here and there and here != there:  # without a version it was shipped with --py-files
        raise LaunchError(
            f"host {host} has horovod_runner {there} and the driver {here}: install the same "
            "version on every host."
        )


def _version(software: Software, package: str) -> str:
    return f"{package} {software[package]}" if package in software else f"no {package}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(software: Software, package: str) -> str:
    return software.get(package, "").partition(".")[0]
