"""Messages arrive in all sizes; the speed of an allreduce, compared with its peers'."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final

from horovod_runner.results.page.numbers import duration
from horovod_runner.tools.hello import COUNTS, expected_total, hello
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal, speed
from horovod_runner.tools.verify.checks.timing import take_turns

PROGRAM: Final = "all_reduce_perf"
_OURS, _PEER = "Horovod", "torch.distributed"
#: The bytes of a tensor. The speed of the largest one is judged.
_SIZES: Final = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
_QUICK_SIZES: Final = (4 << 10, 1 << 20)
_LEAST: Final = 0.8  # of a peer's bandwidth
_PROGRAM_SECONDS: Final = 120

#: Seconds of an allreduce, by system and bytes.
AllreduceTimes = dict[str, dict[int, float]]


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """The bus bandwidth of an allreduce of some bytes in GB/s, as nccl-tests computes it.

    It does not depend on the number of ranks, so it can be compared with that of the links.
    """
    return size / seconds / 1e9 * 2 * (ranks - 1) / ranks


@check("where/docker.md#what-containers-forbid", 120)
def messages(case: VerifyCase) -> Iterator[VerifyReading]:
    """Two ranks of this machine sum one number, 64 KB and 64 MB."""
    ranks = hello("torch", -2)
    expected = expected_total(ranks)
    for name in COUNTS:
        wrong = [each.rank for each in ranks if name in each.wrong]
        yield equal(f"sum of {name}", f"wrong on ranks {wrong}" if wrong else expected, expected)


@check("howto/gpu.md#how-fast", 240, Needs(several=True))
def allreduce(case: VerifyCase) -> Iterator[VerifyReading]:
    """An allreduce is about as fast as torch.distributed's, and as nccl-tests measures NCCL."""
    ranks = case.ranks()
    sizes = _QUICK_SIZES if case.quick or not case.on_gpus() else _SIZES
    turns = 2 if case.quick else 5
    times = case.runner(ranks).run_all(time_allreduce, sizes=sizes, turns=turns)
    judge = case.judges_speed
    yield from read_times(times, judge=judge)
    if not case.on_gpus():
        return
    program = find_program()
    if program is None:
        yield VerifyReading(
            "nccl-tests",
            f"not installed: no {PROGRAM} on PATH or in $NCCL_TESTS_HOME/build",
        )
        return
    ours = bus_bandwidth(sizes[-1], mean(each[_OURS][sizes[-1]] for each in times), ranks)
    yield run_program(program, ranks, sizes[-1], ours, judge=judge)


def time_allreduce(sizes: Sequence[int], turns: int) -> AllreduceTimes:
    """Time allreduces of some bytes in turns with a peer; the ranks' ``main``."""
    import horovod.torch as hvd
    import torch
    import torch.distributed

    hvd.init()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.zeros(1, device=device)  # the current device is set when CUDA starts
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    found: AllreduceTimes = {_OURS: {}, _PEER: {}}
    for size in sizes:
        tensor = torch.zeros(size // 4, device=device)
        systems = {
            _OURS: partial(hvd.allreduce_, tensor, name=f"of {size}", op=hvd.Sum),
            _PEER: partial(torch.distributed.all_reduce, tensor),
        }
        count = max(10, min(50, (1 << 30) // size))
        for system, seconds in take_turns(systems, turns + 1, count).items():
            found[system][size] = seconds
    torch.distributed.destroy_process_group()
    return found


def read_times(times: Sequence[AllreduceTimes], *, judge: bool) -> list[VerifyReading]:
    """Compare the ranks' times with the peer's; the largest tensor's may be judged."""
    readings = []
    ranks, sizes = len(times), list(times[0][_OURS])
    for size in sizes:
        seconds = {system: mean(each[system][size] for each in times) for system in (_OURS, _PEER)}
        figures = "; ".join(_figure(system, size, s, ranks) for system, s in seconds.items())
        name = f"allreduce of {_power_of_two(size)}, {_OURS} / {_PEER}"
        ratio = seconds[_PEER] / seconds[_OURS]
        if size == sizes[-1]:
            readings.append(speed(name, ratio, _LEAST, figures, judge=judge))
        else:
            readings.append(VerifyReading(name, f"{ratio:.2f} ({figures})"))
    return readings


def _power_of_two(size: int) -> str:
    """A size in the units of nccl-tests' options, "256 MiB"."""
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def _figure(system: str, size: int, seconds: float, ranks: int) -> str:
    bandwidth = bus_bandwidth(size, seconds, ranks)
    return f"{system} {bandwidth:.3g} GB/s bus bandwidth, {duration(seconds)}"


def find_program(variables: Mapping[str, str] = os.environ) -> Path | None:
    """nccl-tests' program for allreduce; None if it is not installed."""
    home = variables.get("NCCL_TESTS_HOME")
    folders = [Path(home, "build"), Path(home)] if home else []
    path = os.pathsep.join([*map(str, folders), variables.get("PATH", os.defpath)])
    found = shutil.which(PROGRAM, path=path)
    return Path(found) if found else None


def run_program(program: Path, ranks: int, size: int, ours: float, *, judge: bool) -> VerifyReading:
    """Run nccl-tests on the same GPUs, and compare its bus bandwidth with ours, both in GB/s."""
    command = [str(program), "-b", f"{size}", "-e", f"{size}", "-g", f"{ranks}"]
    name = f"allreduce of {_power_of_two(size)}, {_OURS} / nccl-tests"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return VerifyReading(name, f"{PROGRAM} did not run: {error}")
    theirs = read_program(done.stdout).get(size)
    if done.returncode or not theirs:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        return VerifyReading(name, f"{PROGRAM} ended with exit code {done.returncode}: {last[0]}")
    figures = f"{_OURS} {ours:.3g} GB/s bus bandwidth, nccl-tests {theirs:.3g} GB/s in place"
    return speed(name, ours / theirs, _LEAST, figures, judge=judge)


def read_program(printed: str) -> dict[int, float]:
    """The in-place bus bandwidths in GB/s that nccl-tests printed, by bytes.

    Its lines have size, count, type, operation and root, and then twice, out of place and in place,
    the time, the algorithm bandwidth, the bus bandwidth, and how many numbers were wrong.
    """
    found = {}
    for line in printed.splitlines():
        fields = line.split()
        if len(fields) == 13 and re.fullmatch(r"\d+", fields[0]):
            found[int(fields[0])] = float(fields[11])
    return found
