"""What is installed where, and what of it does not fit together.

Tasks tell in their first message; the driver compares before any worker is started.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence

from horovod_runner.errors import LaunchError
from horovod_runner.messages import Controller, ControllerChoice

_FRAMEWORKS = ("horovod", "torch", "tensorflow", "keras")
_PACKAGES = frozenset((*_FRAMEWORKS, "cloudpickle", "numpy", "horovod_runner"))
# What a Horovod that this package built against that wheel requires.
_MPICH = "mpich"
_DIST_INFO = re.compile(r"(?P<name>[\w.]+)-(?P<version>[^-]+)\.dist-info$")
_ALIASES = {"tensorflow_cpu": "tensorflow", "tensorflow_gpu": "tensorflow"}

Software = Mapping[str, str]


def installed(path: Sequence[str] = ()) -> dict[str, str]:
    """The versions of what counts here; from folder names: importlib.metadata takes far longer."""
    found = {"python": platform.python_version()}
    mpich, built = "", False
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
                if package == "horovod" and package not in found:
                    built = _requires_mpich(os.path.join(entry, name))
                if package in _PACKAGES:
                    found.setdefault(package, match["version"])
                elif package == _MPICH:
                    mpich = mpich or match["version"]
    if built and mpich:
        found[_MPICH] = mpich
    return found


def _requires_mpich(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "METADATA"), encoding="utf-8") as file:
            return f"\nRequires-Dist: {_MPICH}" in file.read()
    except OSError:
        return False


def choose_controller(
    wanted: ControllerChoice, hosts: Mapping[str, Software]
) -> tuple[Controller, str]:
    """What the ranks' Horovod goes by, and a line that says so.

    Args:
        wanted: as given to HorovodRunner.
        hosts: what each host has, by hostname.

    Raises:
        LaunchError: MPI is wanted, and some host has none.
    """
    if wanted == "gloo":
        return "gloo", "controller: Gloo, as asked for"
    versions = {there.get(_MPICH, ""): host for host, there in hosts.items()}
    if len(versions) == 1 and "" not in versions:
        return "mpi", f"controller: MPI (MPICH {next(iter(versions))})"
    remedy = "pip install mpich, then horovod-runner install"
    if "" in versions:
        why = f"the Horovod of {versions['']} was not built with the mpich package: {remedy}"
    else:
        listed = ", ".join(f"{version} on {host}" for version, host in versions.items())
        why = f"the hosts have different versions of mpich ({listed}): {remedy} on each"
    if wanted == "mpi":
        raise LaunchError(f"controller='mpi' cannot be had: {why}. Or leave controller out.")
    return "gloo", f"controller: Gloo; {why}, and MPI reduces on CPUs several times as fast"


def compare(driver: Software, hosts: Mapping[str, Software], main: bytes) -> list[str]:
    """What may go wrong, a line each.

    Args:
        driver: what the driver has.
        hosts: what each host has, by hostname.
        main: the pickled function, which holds the names of the modules that it imports.

    Raises:
        LaunchError: it cannot go well.
    """
    warnings = []
    for host, there in hosts.items():
        if not there:
            continue  # it does not tell
        _refuse(host, there, driver)
        for package in _FRAMEWORKS:
            if package in driver and package not in there and package.encode() in main:
                remedy = (
                    "horovod-runner install"
                    if package == "horovod"
                    else f"pip install {package}=={driver[package].partition('+')[0]}"
                )
                warnings.append(
                    f"host {host} has no {package}, which main seems to use: run there: {remedy}"
                )
        # An array or a function of a later major release does not load in an earlier one.
        for package in ("cloudpickle", "numpy"):
            if _major(there, package) != _major(driver, package):
                warnings.append(
                    f"host {host} has {package} {there.get(package, 'not at all')} and the driver "
                    f"{driver.get(package, 'not at all')}: what is pickled in one may not load in "
                    "the other"
                )
    for package in _FRAMEWORKS:
        versions = {there[package]: host for host, there in hosts.items() if package in there}
        if len(versions) > 1 and package.encode() in main:
            listed = ", ".join(f"{version} on {host}" for version, host in versions.items())
            if package == "horovod":
                raise LaunchError(
                    f"the ranks' hosts have different versions of horovod: {listed}. They do not "
                    "speak one protocol: run horovod-runner install on each."
                )
            warnings.append(f"the ranks' hosts have different versions of {package}: {listed}")
    return warnings


def _refuse(host: str, there: Software, driver: Software) -> None:
    python = there.get("python", driver["python"])
    if _minor(python) != _minor(driver["python"]):
        raise LaunchError(
            f"host {host} runs Python {python} and the driver {driver['python']}: a "
            f"function does not go from one to the other. Set spark.pyspark.python (or "
            f"PYSPARK_PYTHON) to a Python {_minor(driver['python'])} on every host."
        )
    own, its = driver.get("horovod_runner"), there.get("horovod_runner")
    if own and its and own != its:  # else it came along, by --py-files
        raise LaunchError(
            f"host {host} has horovod_runner {its} and the driver {own}: install the same version "
            "on every host."
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(software: Software, package: str) -> str:
    return software.get(package, "").partition(".")[0]
