"""A check: what it claims and needs, the case it is run with, and the readings it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from horovod_runner.common.options import grouped
from horovod_runner.common.text import count_text
from horovod_runner.tools.verify.machine import PACKAGES, ThisMachine

if TYPE_CHECKING:
    from horovod_runner.run.runner import HorovodRunner

_CPU_RANKS = 2


class VerifyReading(msgspec.Struct, frozen=True, tag="reading"):
    """One thing that a check saw, beside what it expected."""

    name: str
    seen: str
    expected: str = ""
    ok: bool | None = None  # whether the two agree; None if it is only shown


class VerifyCase(msgspec.Struct, frozen=True):
    """The input of a check."""

    machine: ThisMachine
    quick: bool  # whether to use tiny sizes. Speeds mean nothing then, and are not judged
    folder: str  # an empty folder for files

    def ranks(self, framework: str = "torch") -> int:
        """How many ranks use all GPUs, one each; two on CPUs."""
        return len(self.machine.gpus) if self.on_gpus(framework) else _CPU_RANKS

    def on_gpus(self, framework: str = "torch") -> bool:
        """Whether ranks of a framework train on GPUs."""
        return self.machine.has_nccl(framework)

    @property
    def judges_speed(self) -> bool:
        """Whether speeds mean anything: torch on GPUs, and with sizes that are not tiny."""
        return self.on_gpus() and not self.quick

    def runner(self, np: int, framework: str = "torch", **options: Any) -> HorovodRunner:
        """A runner of ranks on this machine; without GPUs for the framework, they use none."""
        from horovod_runner.run.runner import HorovodRunner  # ranks import this module, too

        if not self.on_gpus(framework):
            options.setdefault("gpus_per_rank", 0)
        return HorovodRunner(np=-np, progress=False, **grouped(options))


decode_case: Final = msgspec.json.Decoder(VerifyCase).decode


@dataclass(frozen=True)
class Needs:
    """The requirements of a check."""

    gpus: int = 0
    several: bool = False  # two ranks with a GPU each, or a machine without GPUs
    frameworks: tuple[str, ...] = ("torch",)  # with Horovod for them
    packages: tuple[str, ...] = ()  # of machine.PACKAGES


@dataclass(frozen=True)
class VerifyCheck:
    """A claim, and what shows whether it is true."""

    page: str  # where the docs say so: a page, and a heading in it
    limit: float  # seconds after which it is ended, and has failed
    # Yields the readings. The check runs in its own process, and may start ranks.
    function: Callable[[VerifyCase], Iterable[VerifyReading]]
    needs: Needs  # otherwise it is skipped

    @property
    def name(self) -> str:
        """The name, as in ``--only``: that of the function, with dashes."""
        return self.function.__name__.replace("_", "-")

    @property
    def claim(self) -> str:
        """The sentence that the check proves: the function's docstring; empty with python -OO."""
        return " ".join((self.function.__doc__ or "").split())


def check(
    page: str, limit: float, needs: Needs = Needs()
) -> Callable[[Callable[[VerifyCase], Iterable[VerifyReading]]], VerifyCheck]:
    """Make a check of a function, which has its name and claim; see :class:`VerifyCheck`."""
    return lambda function: VerifyCheck(page, limit, function, needs)


def missing(needs: Needs, machine: ThisMachine) -> str:
    """Why a check cannot run on a machine; empty if it can."""
    for name in needs.frameworks:
        reason = _missing_framework(name, needs, machine)
        if reason:
            return reason
    count = len(machine.gpus)
    if count < needs.gpus:
        there = count_text(count, "GPU") if count else "no GPUs"
        return f"needs {count_text(needs.gpus, 'GPU')}, and {there} can be used"
    if needs.several and count == 1 and machine.has_nccl(needs.frameworks[0]):
        return "needs two GPUs, and 1 GPU can be used"
    for package in needs.packages:
        if package not in machine.packages:
            return f"the package {package} is not installed: {PACKAGES[package]}"
    return ""


def _missing_framework(name: str, needs: Needs, machine: ThisMachine) -> str:
    installed = next((f for f in machine.frameworks if f.name == name), None)
    if installed is None:
        return f"{name} is not installed"
    if installed.error:
        return f"{name} cannot be imported: {installed.error}"
    if installed.horovod is None or installed.horovod.error:
        return f"Horovod for {name} is not installed: horovod-runner install --frameworks {name}"
    if needs.gpus and machine.gpus:
        if not installed.cuda:
            return f"{name} {installed.version} is a CPU build"
        if not machine.has_nccl(name):
            return (
                f"Horovod for {name} was built without NCCL: horovod-runner install --gpu "
                f"--frameworks {name} --rebuild"
            )
    return ""


def listed(values: Iterable[object]) -> str:
    """Values, one after another: a figure of each rank."""
    return ", ".join(map(str, values))


def equal(name: str, seen: object, expected: object) -> VerifyReading:
    """A reading of something that has one right value; a list has those of each rank."""
    return VerifyReading(name, _text(seen), _text(expected), seen == expected)


def _text(value: object) -> str:
    if isinstance(value, set):
        value = sorted(value)
    return listed(value) if isinstance(value, list) else str(value)


def speed(name: str, ratio: float, least: float, seen: str, *, judge: bool) -> VerifyReading:
    """A reading of a speed: its ratio to a peer's has to be ``least``, if it is judged."""
    expected = f"at least {least:g}"
    if not judge:
        return VerifyReading(name, f"{ratio:.2f} ({seen})", f"{expected}, on GPUs without --quick")
    return VerifyReading(name, f"{ratio:.2f} ({seen})", expected, ratio >= least)
