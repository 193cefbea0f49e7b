"""Decides what to build Horovod for: frameworks, MPI, CUDA and NCCL, and the name of the wheel."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from horovod_runner.errors import InstallError
from horovod_runner.tools.horovod_build import source, toolchain

MpiChoice = Literal["mpich", "system", "none"]


@dataclass(frozen=True)
class BuildPlan:
    """The frameworks that a build of Horovod supports, and the libraries that it uses."""

    frameworks: tuple[toolchain.Framework, ...]
    gpu: bool = False  # build CUDA kernels and NCCL collectives
    # Beside Gloo, for the controller and for collectives on CPUs; None builds Gloo only.
    mpi: toolchain.Mpi | None = None
    cuda_home: Path | None = None
    nccl: toolchain.Nccl | None = None
    gpu_architectures: str | None = None  # as "80,90"; None leaves Horovod's default

    def key(self) -> str:
        """The wheel's name in the cache: every version that the build depends on is part of it."""
        parts = [f"horovod-{source.VERSION}-{source.digest()}", sysconfig.get_config_var("SOABI")]
        parts += [f"{f.name}-{f.version}" for f in self.frameworks]
        parts += [f"{f.name}-abi0" for f in self.frameworks if f.cxx11_abi is False]
        if self.gpu and self.nccl:
            cuda = next((f.cuda for f in self.frameworks if f.cuda), "unknown")
            architectures = self.gpu_architectures or "default"
            parts.append(f"cuda-{cuda}-nccl-{self.nccl.version}-cc-{architectures}")
        if self.mpi:
            parts.append(f"{'mpich' if self.mpi.package else 'mpi'}-{self.mpi.version}")
        parts.append(f"{platform.machine()}{arch_flags().replace(' ', '')}")
        parts.append("".join(platform.libc_ver()))
        return "_".join(re.sub(r"[^\w.+-]", "-", str(part)) for part in parts)

    def describe(self) -> str:
        """One line for the user: version, frameworks and collectives."""
        frameworks = " and ".join(f"{f.name} {f.version}" for f in self.frameworks)
        collectives = ["Gloo"] + ["NCCL"] * self.gpu
        if self.mpi:
            kind = "the mpich package" if self.mpi.package else "the system's"
            collectives.append(f"MPI ({kind}, {self.mpi.version})")
        return f"Horovod {source.VERSION} for {frameworks}, with {', '.join(collectives)}"


def make_plan(
    frameworks: Sequence[str] | None = None,
    gpu: bool | None = None,
    mpi: MpiChoice | None = None,
) -> BuildPlan:
    """Plan a build for what this environment and this machine have.

    Args:
        frameworks: names of the frameworks to support; None means all that are installed.
        gpu: True requires an NCCL build, False a CPU build. None builds with NCCL if all frameworks
            are CUDA builds and the CUDA toolkit and NCCL are installed.
        mpi: the MPI to build beside Gloo: the "mpich" package of this environment, the "system"'s
            MPI, or "none". None means the mpich package if it is installed.

    Raises:
        InstallError: a framework is missing or does not import, or the MPI, the CUDA toolkit or
            NCCL of the requested build is missing.
    """
    return plan_for(find_frameworks(frameworks), gpu, mpi)


def plan_for(
    supported: tuple[toolchain.Framework, ...], gpu: bool | None, mpi: MpiChoice | None
) -> BuildPlan:
    """Plan a build for frameworks that were found, see :func:`make_plan`."""
    on_cpus = BuildPlan(supported, mpi=_find_mpi(mpi))
    if gpu is False:
        return on_cpus
    cuda_home, nccl = toolchain.find_cuda_home(), toolchain.find_nccl()
    obstacle = _gpu_obstacle(supported, cuda_home, nccl)
    if gpu and obstacle:
        raise InstallError(f"--gpu needs {obstacle}")
    if obstacle:
        return on_cpus
    architectures = toolchain.wanted_architectures()
    return replace(
        on_cpus, gpu=True, cuda_home=cuda_home, nccl=nccl, gpu_architectures=architectures
    )


def find_frameworks(names: Sequence[str] | None) -> tuple[toolchain.Framework, ...]:
    """Import the frameworks of these names, or all that are installed."""
    unknown = set(names or ()) - set(toolchain.FRAMEWORKS)
    if unknown:
        raise InstallError(
            f"unknown framework {', '.join(sorted(unknown))}; choose from torch and tensorflow."
        )
    # In one order, which is part of the wheel's name: the same wheel is found again.
    candidates = [name for name in toolchain.FRAMEWORKS if not names or name in names]
    installed = tuple(toolchain.find_frameworks(candidates))
    found = {framework.name for framework in installed}
    for name in names or ():
        if name not in found:
            raise InstallError(f"{name} is not installed in {sys.prefix}: pip install {name}")
    for framework in installed:
        if framework.error:
            raise InstallError(
                f"{framework.name} {framework.version} is installed but does not import "
                f"({framework.error}). Reinstall it, or leave it out with --frameworks."
            )
    if not installed:
        raise InstallError(
            f"neither torch nor tensorflow is installed in {sys.prefix}: install one first."
        )
    return installed


def _find_mpi(wanted: MpiChoice | None) -> toolchain.Mpi | None:
    if wanted == "none":
        return None
    mpi = toolchain.find_system_mpi() if wanted == "system" else toolchain.find_mpich()
    if mpi is None and wanted == "system":
        raise InstallError(
            "--mpi system needs an MPI compiler wrapper (mpicxx) on PATH: install libopenmpi-dev, "
            "or load your site's MPI module. HorovodRunner itself uses the mpich package: pip "
            "install mpich, and leave --mpi out."
        )
    if mpi is None and wanted == "mpich":
        raise InstallError(f"mpich is not installed in {sys.prefix}: pip install mpich")
    return mpi


def _gpu_obstacle(
    frameworks: Sequence[toolchain.Framework],
    cuda_home: Path | None,
    nccl: toolchain.Nccl | None,
) -> str | None:
    """The first requirement of a GPU build that is not met; None if all are met."""
    for framework in frameworks:
        if framework.cuda is None:
            return (
                f"CUDA builds of all frameworks, and {framework.name} {framework.version} is a "
                "CPU build: install a CUDA build, or leave it out with --frameworks."
            )
    majors = {f.name: str(f.cuda).split(".")[0] for f in frameworks}
    if len(set(majors.values())) > 1:
        releases = " and ".join(f"{f.name} is for CUDA {f.cuda}" for f in frameworks)
        return f"frameworks of one CUDA release, and {releases}: choose one with --frameworks."
    if cuda_home is None:
        return "nvcc and CUDA's headers: install the CUDA toolkit and set CUDA_HOME."
    version = toolchain.cuda_version(cuda_home)
    if version.split(".")[0] not in majors.values():
        return (
            f"CUDA {frameworks[0].cuda}, for which {frameworks[0].name} was built, and "
            f"{cuda_home} has {version}: set CUDA_HOME to a toolkit of that release."
        )
    if nccl is None:
        return "NCCL's nccl.h and libnccl.so: pip install nvidia-nccl-cu12 (or -cu13)."
    return None


def python_tag() -> str:
    """The tag of this interpreter in the name of a wheel: "cp313", or "cp313t" without the GIL."""
    return f"cp{sysconfig.get_config_var('SOABI').split('-')[1]}"


def arch_flags() -> str:
    """Compiler flags for this processor: ``$HOROVOD_BUILD_ARCH_FLAGS``, or Horovod's default."""
    chosen = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS")
    if chosen is not None:
        return chosen
    features = toolchain.processor_features()
    return " ".join(f"-m{feature}" for feature in ("f16c", "avx", "fma") if feature in features)
