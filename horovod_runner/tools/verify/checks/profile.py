"""The measurements of a run's GPUs, and the trace of torch's profiler."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from horovod_runner.common.text import bytes_text
from horovod_runner.tools.verify.check import VerifyCase, VerifyReading, check, equal, listed
from horovod_runner.wire.measurements import Machine

_SECONDS: Final = 13.0  # a run measures its GPUs every five seconds
_QUICK_SECONDS: Final = 1.0
_FEWEST_STEPS: Final = 25  # torch's profiler records steps 10 to 20


@check("howto/gpu.md#how-busy-they-are", 120)
def profile(case: VerifyCase) -> Iterator[VerifyReading]:
    """A run measures its GPUs, and torch's profiler records their kernels."""
    traces = Path(case.folder, "traces")
    runner = case.runner(case.ranks(), torch_profiler=str(traces))
    seconds = _QUICK_SECONDS if case.quick else _SECONDS
    steps = runner.run_all(train, seconds=seconds, width=64 if not case.on_gpus() else 4096)
    run = runner.last_run
    if run is None:
        return  # never: it has ended
    counted = [run.profile.steps(rank) for rank in range(len(steps))]
    yield equal("steps in the profile of each rank", counted, steps)
    yield VerifyReading("diagnosis", " ".join(str(run.diagnose()).splitlines()[:2]))
    texts = {
        each.rank: gzip.decompress(Path(each.path).read_bytes()).decode(errors="replace")
        for each in run.traces
        if each.kind == "torch"
    }
    yield read_traces(texts, len(steps), on_gpus=case.on_gpus())
    if case.on_gpus():
        measured = "pynvml" in case.machine.packages
        yield from read_machines(run.profile.machines, len(steps), measured=measured)


def train(seconds: float, width: int) -> int:
    """Train for some seconds; the ranks' ``main``. Returns the steps, the same on all ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    x = torch.randn(256, width, device=device)
    steps, end = 0, time.monotonic() + seconds
    while True:
        # All ranks end after the same step.
        goes_on = torch.tensor(float(steps < _FEWEST_STEPS or time.monotonic() < end))
        if not hvd.allreduce(goes_on, op=hvd.Max, name="goes on").item():
            return steps
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1


def read_traces(texts: Mapping[int, str], ranks: int, *, on_gpus: bool) -> VerifyReading:
    """Judge the traces of torch's profiler, by rank."""
    category = "kernel" if on_gpus else "cpu_op"
    shown = [rank for rank, text in sorted(texts.items()) if f'"cat": "{category}"' in text]
    what = "kernels of the GPU" if on_gpus else "operations"
    name = f"ranks whose torch trace shows {what}"
    return equal(name, listed(shown) or "none", listed(range(ranks)))


def read_machines(
    rows: Mapping[int, Sequence[Machine]], ranks: int, *, measured: bool
) -> list[VerifyReading]:
    """Judge the measurements of GPUs, by rank; there are some with NVIDIA's Python package."""
    if not measured:
        remedy = "not measured: pip install 'horovod_runner[gpu]' (nvidia-ml-py)"
        return [VerifyReading("GPUs that the run measured", remedy)]
    each = [max(rows[n], key=lambda m: m.gpu_busy) for n in range(ranks) if rows.get(n)]
    busy = listed(f"{m.gpu_busy:.0%}" for m in each)
    memory = listed(f"{bytes_text(m.gpu_memory)} of {bytes_text(m.gpu_memory_limit)}" for m in each)
    are_busy = bool(each) and all(m.gpu_busy > 0 for m in each)
    are_used = bool(each) and all(0 < m.gpu_memory <= m.gpu_memory_limit for m in each)
    return [
        equal("GPUs that the run measured, by rank", [m.gpus for m in each], [1] * ranks),
        VerifyReading("how busy they were at most", busy, "above 0%", are_busy),
        VerifyReading("memory in use on them", memory, "above 0", are_used),
        VerifyReading("GPUs slowed by heat or power", listed(m.gpus_slowed for m in each)),
    ]
