"""Whether Horovod was built for the machine's GPUs, and whether all reductions are right there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from horovod_runner.tools.horovod_build import toolchain
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal, listed
from horovod_runner.tools.verify.machine import ThisMachine

_PLANES: Final = ("NCCL", "MPI", "GLOO")
_NUMBERS: Final = 1000  # in a small tensor
# NCCL multiplies by 1/size before it adds, and 1/3 is rounded.
_ROUNDING: Final = 1e-5
_LARGE: Final = 16 << 20  # numbers in a large one: 64 MiB


@check("howto/gpu.md#building", 60, Needs(frameworks=()))
def build(case: VerifyCase) -> Iterator[VerifyReading]:
    """Horovod is built with NCCL for a framework of this environment."""
    yield from read_libraries(case.machine)


def read_libraries(machine: ThisMachine) -> list[VerifyReading]:
    """Judge the libraries for the frameworks of a machine."""
    readings = [_library(each, machine) for each in machine.frameworks]
    readings += [
        VerifyReading('backend "hvd" of torch.distributed', f"missing: {each.horovod.backend}")
        for each in machine.frameworks
        if each.horovod and each.horovod.backend
    ]
    if machine.gpus:
        ready = [each.name for each in machine.frameworks if machine.has_nccl(each.name)]
        remedy = "" if ready else ": horovod-runner install --gpu --rebuild"
        name, seen = "frameworks whose gradients go over NCCL", listed(ready) or "none"
        readings.append(VerifyReading(name, seen + remedy, "at least one", bool(ready)))
        readings.append(VerifyReading("NCCL", machine.nccl or "not found"))
        for gpu in machine.gpus:
            known = f"{gpu.name} {gpu.uuid}".strip()
            readings.append(VerifyReading(f"GPU {gpu.device}", known or "unknown"))
    return readings


def _library(framework: toolchain.Framework, machine: ThisMachine) -> VerifyReading:
    name = f"Horovod for {framework.name}"
    about = f"{framework.name} {framework.version}, {framework.kind}"
    horovod = framework.horovod
    if framework.error or horovod is None or horovod.error:
        error = framework.error or (horovod.error if horovod else None) or "not installed"
        return VerifyReading(name, f"{error} ({about})", "loads", False)
    planes = ", ".join(horovod.built)
    # One build serves one CUDA release, so another framework may be the one with NCCL.
    needs_nccl = machine.gpus and framework.cuda and not machine.has_nccl(framework.name)
    ok = None if needs_nccl else True
    return VerifyReading(name, f"{horovod.version} with {planes} ({about})", "loads", ok)


class Reduced(NamedTuple):
    """The result of one collective on one rank: whether it is right, and the type of its device."""

    name: str
    right: bool
    device: str


@check("howto/gpu.md#building", 120)
def reductions(case: VerifyCase) -> Iterator[VerifyReading]:
    """Horovod's collectives give right results on the ranks' GPUs, and allreduces go over NCCL."""
    timeline = Path(case.folder, "timeline.json")
    runner = case.runner(case.ranks(), timeline=str(timeline))
    numbers = _NUMBERS if case.quick else _LARGE
    results = runner.run_all(collectives, large=numbers)
    yield from read_reductions(results, "cuda" if case.on_gpus() else "cpu")
    yield carried_by(timeline.read_text(errors="replace"), on_gpus=case.on_gpus())


def collectives(large: int) -> list[Reduced]:
    """Run Horovod's collectives on this rank's device; the ranks' ``main``."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, rank = hvd.size(), hvd.rank()
    found: list[Reduced] = []

    def compare(name: str, result: Any, expected: Any, within: float = 0.0) -> None:
        found.append(Reduced(name, is_right(result, expected, within), result.device.type))

    # Small whole numbers: their sums are exact in all types.
    base = torch.arange(_NUMBERS, device=device) % 7
    others = size * (size - 1) // 2  # the sum of the ranks
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        name, mine = str(dtype).removeprefix("torch."), (base + rank).to(dtype)
        compare(f"sum of {name}", hvd.allreduce(mine, op=hvd.Sum), (base * size + others).to(dtype))
        compare(f"maximum of {name}", hvd.allreduce(mine, op=hvd.Max), (base + size - 1).to(dtype))
    mine, plain = (base + rank).float(), base.float()
    average = hvd.allreduce(mine, op=hvd.Average)
    compare("average", average, plain + (size - 1) / 2, _ROUNDING)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    compare("scaled sum", scaled, 2 * (plain * size + others))
    for number, part in enumerate(hvd.grouped_allreduce([mine, mine * 2, mine * 4], op=hvd.Sum)):
        compare(f"tensor {number} of a group", part, 2**number * (plain * size + others))
    compare("broadcast", hvd.broadcast(mine, size - 1), plain + size - 1)
    ranks = torch.arange(size, device=device)
    gathered = hvd.allgather(torch.full((2,), rank, device=device))
    compare("allgather", gathered, ranks.repeat_interleave(2))
    compare("alltoall", hvd.alltoall(ranks + size * rank), ranks * size + rank)
    part = hvd.reducescatter(torch.ones(2 * size, device=device), op=hvd.Sum)
    compare("reducescatter", part, torch.full((2,), float(size), device=device))
    tensor = torch.full((large,), float(rank), device=device)
    compare("large sum", hvd.allreduce_(tensor, op=hvd.Sum), torch.full_like(tensor, float(others)))
    return found


def is_right(result: Any, expected: Any, within: float) -> bool:
    """Whether a tensor is the expected one; ``within`` is the largest relative difference."""
    if result.shape != expected.shape:
        return False
    return bool(((result - expected).abs() <= within * expected.abs()).all())


def read_reductions(results: Sequence[Sequence[Reduced]], device: str) -> list[VerifyReading]:
    """Judge the ranks' results; ``device`` is the expected type of their device."""
    wrong = [
        f"{each.name} on rank {rank}"
        for rank, found in enumerate(results)
        for each in found
        if not each.right
    ]
    devices = {each.device for found in results for each in found}
    count = sum(len(found) for found in results)
    seen = f"{count - len(wrong)} of {count}" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
    name = f"right results on {len(results)} ranks"
    return [
        VerifyReading(name, seen, f"{count} of {count}", not wrong),
        equal("device of the results", devices, {device}),
    ]


def carried_by(timeline: str, *, on_gpus: bool) -> VerifyReading:
    """Read from Horovod's timeline which library carried the allreduces."""
    seen = [plane for plane in _PLANES if f"{plane}_ALLREDUCE" in timeline]
    expected = "NCCL" if on_gpus else "MPI or GLOO"
    ok = seen == ["NCCL"] if on_gpus else bool(seen) and "NCCL" not in seen
    return VerifyReading("allreduces went over", ", ".join(seen) or "nothing known", expected, ok)
