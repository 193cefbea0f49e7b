"""Failed runs leave no processes and no used GPU memory behind, and a restart resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from horovod_runner.common.text import bytes_text
from horovod_runner.errors import CancelledError, HangError, RankFailedError
from horovod_runner.host.gpus import ask_nvidia_smi
from horovod_runner.host.processes import wait_for_end
from horovod_runner.tools.verify.check import VerifyCase, VerifyReading, check, equal

_HELD: Final = 1 << 30  # bytes that a rank allocates on its GPU
_QUICK_HELD: Final = 1 << 20
_NOISE: Final = 64 << 20  # bytes that other processes may take meanwhile
_PATIENCE: Final = 15.0  # seconds for a driver to free the memory of an ended process
_START_SECONDS: Final = 60.0
_STEPS: Final = 6
#: How a rank fails, and the error that the run has to end with.
_ENDS: Final[Mapping[str, type[BaseException]]] = {
    "exception": ArithmeticError,
    "killed": RankFailedError,
    "cancelled": CancelledError,
    "hang": HangError,
}


class FailedRun(NamedTuple):
    """One run that failed: bytes in use on each GPU, by UUID, and how many processes were left.

    ``error`` is its type, and its message if it is not the right one.
    """

    how: str
    error: str
    processes: int
    before: dict[str, int]
    during: dict[str, int]
    after: dict[str, int]


@check("reference/failures.md", 240)
def failures(case: VerifyCase) -> Iterator[VerifyReading]:
    """When a run has failed, no process of it is left, and the memory of its GPUs is free."""
    own = {gpu.uuid for gpu in case.machine.gpus}
    for how in ("exception", "killed") if case.quick else _ENDS:
        yield from read_failure(_fail(case, how, own), on_gpus=case.on_gpus())


def _fail(case: VerifyCase, how: str, own: set[str]) -> FailedRun:
    before = used_memory(own)
    sign = Path(case.folder, f"{how}.held")
    size = case.ranks()
    runner = case.runner(size, hang_timeout=10.0 if how == "hang" else 600.0)
    held = _HELD if case.on_gpus() and not case.quick else _QUICK_HELD
    handle = runner.start(hold_and_fail, how=how, held=held, sign=str(sign))
    try:
        end = time.monotonic() + _START_SECONDS
        while not handle.done() and time.monotonic() < end and len(_signs(sign)) < size:
            time.sleep(0.02)
        during = used_memory(own)
        for rank in _signs(sign):
            rank.with_suffix(".seen").touch()
        if how == "cancelled":
            handle.cancel()
        error = handle.exception()
    except BaseException:  # the check takes too long: the thread of the run has to end, too
        handle.cancel()
        raise
    kind = type(error).__name__
    text = kind if isinstance(error, _ENDS[how]) else f"{kind}: {error}"
    after = _freed(own, before)
    alive = wait_for_end(psutil.Process().children(recursive=True), 0)
    return FailedRun(how, text, len(alive), before, during, after)


def _signs(sign: Path) -> list[Path]:
    """The files by which the ranks say that they hold their memory."""
    return list(sign.parent.glob(f"{sign.name}-*.rank"))


def hold_and_fail(how: str, held: int, sign: str) -> None:
    """Allocate bytes on the rank's device, and let the last rank fail; the ranks' ``main``.

    ``sign`` is the start of the paths of files that say that a rank holds its memory. The driver
    answers each by another one, when it has looked at the GPUs.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor = torch.ones(held // 4, device=device)
    hvd.allreduce(tensor[:1], name="held")
    mine = Path(f"{sign}-{hvd.rank()}.rank")
    mine.touch()
    while not mine.with_suffix(".seen").exists():
        time.sleep(0.02)
    if hvd.rank() == hvd.size() - 1:
        if how == "exception":
            raise ArithmeticError("a failure on purpose")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the run ends: cancelled, or as a hang
            time.sleep(1)
    hvd.allreduce(tensor[:1], name="never complete")


def used_memory(own: set[str]) -> dict[str, int]:
    """Bytes in use on some GPUs by UUID, as nvidia-smi says; empty without it."""
    told = read_used(ask_nvidia_smi("uuid,memory.used"))
    return {uuid: used for uuid, used in told.items() if uuid in own}


def read_used(lines: Sequence[str]) -> dict[str, int]:
    """Bytes by UUID, of lines such as "GPU-1b2c, 1024"; the numbers are MiB."""
    found = {}
    for line in lines:
        uuid, _, used = (part.strip() for part in line.partition(","))
        if used.isdigit():  # "[N/A]" where the GPU is cut into slices (MIG)
            found[uuid] = int(used) << 20
    return found


def _freed(own: set[str], before: Mapping[str, int]) -> dict[str, int]:
    """Bytes in use, as soon as they are as before, or after some seconds."""
    end = time.monotonic() + _PATIENCE
    while True:
        after = used_memory(own)
        if not _more(before, after) or time.monotonic() > end:
            return after
        time.sleep(0.5)


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how many bytes more are in use than before, on the GPUs where it is too much."""
    grown = {uuid: after.get(uuid, 0) - used for uuid, used in before.items()}
    return {uuid: more for uuid, more in grown.items() if more > _NOISE}


def read_failure(seen: FailedRun, *, on_gpus: bool) -> list[VerifyReading]:
    """Judge a failed run."""
    how = seen.how
    readings = [
        equal(f"{how}: error of the run", seen.error, _ENDS[how].__name__),
        equal(f"{how}: processes left", seen.processes, 0),
    ]
    if not on_gpus:
        return readings
    name = f"{how}: memory in use on the GPUs before, during and after"
    if not seen.before:
        return [*readings, VerifyReading(name, "nvidia-smi does not say it")]
    sums = [bytes_text(sum(each.values())) for each in (seen.before, seen.during, seen.after)]
    expected = f"after as before, within {bytes_text(_NOISE)} a GPU"
    ok = not _more(seen.before, seen.after)
    return [*readings, VerifyReading(name, ", ".join(sums), expected, ok)]


@check("howto/checkpoints.md", 120)
def restart(case: VerifyCase) -> Iterator[VerifyReading]:
    """A killed rank is relaunched, and resumes from a checkpoint of GPU tensors."""
    folder = f"{case.folder}/checkpoints"
    runner = case.runner(case.ranks(), max_restarts=1, checkpoint_dir=folder)
    results = runner.run_all(count_up, folder=folder)
    run = runner.last_run
    device = "cuda" if case.on_gpus() else "cpu"
    yield equal("launches", len(run.attempts) if run is not None else 0, 2)
    resumed = run.attempts[-1].resumed_from if run is not None else None
    yield equal("resumed from step", resumed, _STEPS // 2)
    count = len(results)
    yield equal("steps on each rank", [steps for steps, _ in results], [_STEPS] * count)
    yield equal("device of the state", [kind for _, kind in results], [device] * count)


def count_up(folder: str) -> tuple[int, str]:
    """Count steps in a tensor, and let the last rank be killed once; the ranks' ``main``.

    Returns:
        The number of steps, and the type of the tensor's device.
    """
    import horovod.torch as hvd
    import torch

    from horovod_runner import load_checkpoint, save_checkpoint

    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = torch.zeros(1, device=device)
    loaded = load_checkpoint()
    if loaded is not None:
        state.copy_(loaded.state["steps"])
    for step in range(int(state), _STEPS):
        # A sum of ones is exact, and NCCL's average is rounded.
        state += hvd.allreduce(torch.ones(1, device=device), op=hvd.Sum) / hvd.size()
        if step + 1 == _STEPS // 2:
            save_checkpoint({"steps": state}, step + 1)
        if loaded is None and step + 1 > _STEPS // 2 and hvd.rank() == hvd.size() - 1:
            while not list(Path(folder).glob("checkpoint-*.json")):  # until it is complete
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
    return int(state), state.device.type
