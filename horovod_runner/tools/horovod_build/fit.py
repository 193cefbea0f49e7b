"""Decides which published wheel fits an environment, and says why the others do not."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from horovod_runner.tools.horovod_build import source, toolchain
from horovod_runner.tools.horovod_build.libraries import numbers
from horovod_runner.tools.horovod_build.plan import MpiChoice, python_tag
from horovod_runner.tools.horovod_build.provenance import Provenance

_SHOWN = 3  # the wheels whose obstacle is told one by one


@dataclass(frozen=True)
class Wish:
    """The environment and the options that a wheel has to fit."""

    frameworks: tuple[toolchain.Framework, ...]
    gpu: bool | None  # None: for GPUs where `wants_gpu` says so
    # See make_plan. None takes a wheel with or without the mpich package, which pip installs with
    # the wheel that needs it.
    mpi: MpiChoice | None
    python: str  # the interpreter's tag ("cp313")
    machine: str  # the processor's architecture
    features: frozenset[str]  # the processor's
    glibc: str  # its version; empty without glibc
    gpus: bool  # whether this machine has some
    capabilities: tuple[int, ...] = ()  # of the GPUs (80 is 8.0); empty if they are not known

    @property
    def wants_gpu(self) -> bool:
        """Whether a wheel without NCCL would leave GPUs unused."""
        if self.gpu is None:
            majors = {str(f.cuda).partition(".")[0] for f in self.frameworks}
            return self.gpus and all(f.cuda for f in self.frameworks) and len(majors) == 1
        return self.gpu


def wish(
    frameworks: tuple[toolchain.Framework, ...],
    gpu: bool | None,
    mpi: MpiChoice | None,
    *,
    gpus: bool,
) -> Wish:
    """Describe this environment and this machine; see :class:`Wish`."""
    kind, version = platform.libc_ver()
    architectures = toolchain.wanted_architectures() if gpus or gpu else None
    return Wish(
        frameworks=frameworks,
        gpu=gpu,
        mpi=mpi,
        python=python_tag(),
        machine=platform.machine(),
        features=toolchain.processor_features(),
        glibc=version if kind == "glibc" else "",
        gpus=gpus,
        capabilities=tuple(map(int, re.findall(r"\b\d{2,3}\b", architectures or ""))),
    )


def choose(wheels: Sequence[Provenance], wanted: Wish) -> tuple[Provenance | None, list[str]]:
    """The best wheel that fits, or a line for each reason why none does.

    Of several that fit, one with MPI is better than one with Gloo alone, and one for an older C
    library better than one for a newer: it was tested on more machines.
    """
    verdicts = [(wheel, *_obstacle(wheel, wanted)) for wheel in wheels]
    fitting = [wheel for wheel, _, reason in verdicts if not reason]
    if fitting:
        return min(fitting, key=lambda w: (w.mpich is None, numbers(w.glibc), w.file)), []
    # The wheels that pass most checks are those that the user may have expected.
    nearest = sorted(verdicts, key=lambda verdict: -verdict[1])
    reasons = [f"{wheel.file}: {reason}" for wheel, _, reason in nearest[:_SHOWN]]
    if len(nearest) > _SHOWN:
        reasons.append(f"and {len(nearest) - _SHOWN} more, which fit less")
    return None, reasons


def _obstacle(wheel: Provenance, wanted: Wish) -> tuple[int, str]:
    """How many checks a wheel passes, and the first one that it does not; empty if it fits."""
    passed = 0
    for passes, reason in _checks(wheel, wanted):
        if not passes:
            return passed, reason
        passed += 1
    return passed, ""


def _checks(wheel: Provenance, wanted: Wish) -> Iterator[tuple[bool, str]]:
    """The checks of a wheel, the coarsest first: whether it passes, and the reason if not."""
    yield (
        wheel.machine == wanted.machine,
        f"it is for {wheel.machine}, and this machine is {wanted.machine}",
    )
    yield (
        wheel.python == wanted.python,
        f"it is for Python {wheel.python}, and this Python is {wanted.python}",
    )
    here = {framework.name: framework for framework in wanted.frameworks}
    yield (
        set(wheel.frameworks) == set(here),
        f"it is for {' and '.join(wheel.frameworks)}, and {' and '.join(here)} is wanted "
        "(--frameworks chooses)",
    )
    # The C++ interfaces of both frameworks change from release to release. A suffix like +cpu
    # makes no difference: a wheel for CPUs uses the same libraries of either build.
    for name, built in wheel.frameworks.items():
        installed = here[name].version.partition("+")[0]
        yield (
            built.release == installed,
            f"it was built for {name} {built.release}, and {installed} is installed",
        )
        abi = here[name].cxx11_abi
        yield (
            built.cxx11_abi == abi or None in (built.cxx11_abi, abi),
            f"it was built for a {name} with the {_abi(built.cxx11_abi)} C++ interface, and the "
            f"one that is installed has the {_abi(abi)} one",
        )
    for reason in (_gpu_obstacle(wheel, wanted), _mpi_obstacle(wheel, wanted)):
        yield not reason, reason
    yield (
        wheel.horovod == source.VERSION and wheel.patches_digest == source.digest(),
        f"horovod_runner {wheel.horovod_runner} built it, and its patches were others",
    )
    yield (
        bool(wanted.glibc) and numbers(wanted.glibc) >= numbers(wheel.glibc),
        f"it needs glibc {wheel.glibc}, and here is {wanted.glibc or 'another C library'}",
    )
    needed = toolchain.needed_features(wheel.processor_flags)
    lacking = sorted(needed - wanted.features) if wanted.machine == "x86_64" else []
    yield not lacking, f"this processor lacks {', '.join(lacking)}"


def _gpu_obstacle(wheel: Provenance, wanted: Wish) -> str:
    if wheel.gpu is None:
        return "it is for CPUs, and one for GPUs is wanted: --cpu" if wanted.wants_gpu else ""
    if not wanted.wants_gpu:
        return "it is for GPUs, and one for CPUs is wanted: --gpu"
    for framework in wanted.frameworks:
        built = wheel.frameworks[framework.name].cuda
        if framework.cuda != built:
            return f"it is for CUDA {built}, and {framework.name} is for {framework.cuda or 'CPUs'}"
    without = [gpu for gpu in wanted.capabilities if not _runs(wheel.gpu.capabilities, gpu)]
    if without:
        return (
            f"it is for GPUs of compute capability {_capabilities(wheel.gpu.capabilities)}, and "
            f"{_capabilities(without)} is wanted"
        )
    return ""


def _runs(built: Sequence[int], gpu: int) -> bool:
    """Whether kernels for some compute capabilities run on a GPU.

    Machine code runs on later GPUs of its generation, and Horovod's build adds PTX for the latest
    capability, which any later GPU compiles.
    """
    if not built:
        return True  # not known
    return gpu >= max(built) or any(one // 10 == gpu // 10 and one <= gpu for one in built)


def _capabilities(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number // 10}.{number % 10}" for number in numbers)


def _abi(newer: bool | None) -> str:
    return "newer" if newer else "older"


def _mpi_obstacle(wheel: Provenance, wanted: Wish) -> str:
    if wanted.mpi == "system":
        return "it is not for the system's MPI, and --mpi system is wanted"
    if wanted.mpi == "none" and wheel.mpich:
        return "it needs the mpich package, and --mpi none is wanted"
    if wanted.mpi == "mpich" and not wheel.mpich:
        return "it has no MPI, and --mpi mpich is wanted"
    return ""
