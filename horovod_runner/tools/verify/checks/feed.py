"""Batches of a dataset on the rank's GPU: right, through pinned memory, and in time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from horovod_runner.results.page.numbers import duration
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal, speed

_LEAST: Final = 0.8  # of the speed of steps whose batch is on the GPU already
_PINNED: Final = "Memcpy HtoD (Pinned -> Device)"
_STEP_SECONDS: Final = 0.01


class FeedSize(NamedTuple):
    """The dataset: rows, numbers in a row, and rows in a batch of one rank."""

    rows: int
    numbers: int
    batch: int


_FULL: Final = FeedSize(8192, 3 * 64 * 64, 128)
_QUICK: Final = FeedSize(256, 48, 16)


class Fed(NamedTuple):
    """The measurements of a rank."""

    devices: set[str]  # of the batches
    # How many numbers of two epochs were wrong when they were read on the device at once, in the
    # second one on another stream.
    wrong: int
    rows: list[int]  # the numbers of the rows of an epoch
    copies: dict[str, int]  # how many to the GPU torch's profiler saw, by their kinds
    fed: float  # the median seconds of a step with batches of the dataset
    plain: float  # the same with one batch that stays on the device


@check("howto/gpu.md#how-fast", 120, Needs(packages=("pyarrow",)))
def feed(case: VerifyCase) -> Iterator[VerifyReading]:
    """Batches arrive on the rank's GPU, through pinned memory, while the step before computes."""
    from horovod_runner.data import parquet

    size = _QUICK if case.quick or not case.on_gpus() else _FULL
    path = Path(case.folder, "rows.parquet")
    write_rows(path, size)
    results = case.runner(case.ranks()).run_all(read, data=parquet(str(path)), size=size)
    yield from read_feed(results, size, on_gpus=case.on_gpus(), judge=case.judges_speed)


def write_rows(path: Path, size: FeedSize) -> None:
    """Write a dataset in which all numbers of row n are n."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = np.repeat(np.arange(size.rows, dtype="float32"), size.numbers)
    x = pa.FixedSizeListArray.from_arrays(pa.array(numbers), size.numbers)
    table = pa.table({"x": x, "n": pa.array(range(size.rows), pa.int64())})
    pq.write_table(table, path, row_group_size=max(1, size.rows // 16))


def read(data: Any, size: FeedSize) -> Fed:
    """Read the dataset, and time steps with it and without; the ranks' ``main``."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    on_gpu = torch.cuda.is_available()
    batches = data.to_torch(size.batch, {"x": "x", "n": "n"}, shuffle=True)
    devices, wrong, rows = set(), torch.zeros((), dtype=torch.int64), []
    for x, n in batches:
        devices.add(str(x.device))
        # On the device at once, before anything has waited for the copy.
        wrong = wrong.to(x.device) + (x != n[:, None]).sum()
        rows.append(n)
    with other_stream(on_gpu):
        for x, n in batches:
            wrong = wrong + (x != n[:, None]).sum()
        wrong = wrong.cpu()  # waits for the stream
    last, side = x, 2048 if on_gpu else 64
    matrix = torch.randn(side, side, device=x.device) / side**0.5

    def step(batch: torch.Tensor, products: int) -> float:
        start = time.perf_counter()
        out = batch.sum()
        for _ in range(products):
            out = out + (matrix @ matrix)[0, 0]
        out.item()  # waits for the device, as a loop does that looks at its loss
        return time.perf_counter() - start

    step(last, 10)
    products = max(1, round(10 * _STEP_SECONDS / step(last, 10)))
    plain = [step(last, products) for _ in range(3 * len(rows))]
    fed: list[float] = []
    with profiled(on_gpu) as profiler:
        for x, _ in batches:
            step(x, products)
    events = profiler.key_averages() if on_gpu else ()
    copies = {each.key: each.count for each in events if "Memcpy HtoD" in each.key}
    for _ in range(2):
        start = time.perf_counter()
        for x, _ in batches:
            step(x, products)
            fed.append(time.perf_counter() - start)
            start = time.perf_counter()
    return Fed(devices, int(wrong), torch.cat(rows).tolist(), copies, median(fed), median(plain))


def other_stream(on_gpu: bool) -> Any:
    """Another stream of the GPU for what is computed meanwhile; nothing on CPUs."""
    import torch

    if not on_gpu:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def profiled(on_gpu: bool) -> Any:
    """The profiler of torch for what the GPU does, in all threads; nothing on CPUs."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA]) if on_gpu else nullcontext()


def read_feed(
    results: Sequence[Fed], size: FeedSize, *, on_gpus: bool, judge: bool
) -> list[VerifyReading]:
    """Judge the ranks' measurements."""
    devices = [", ".join(sorted(each.devices)) for each in results]
    own = [f"cuda:{rank}" if on_gpus else "cpu" for rank in range(len(results))]
    wrong = sum(each.wrong for each in results)
    rows = {row for each in results for row in each.rows}
    readings = [
        equal("device of each rank's batches", devices, own),
        equal("wrong numbers in two epochs, on two streams", wrong, 0),
        equal("different rows in an epoch of all ranks", len(rows), size.rows),
    ]
    if on_gpus:
        readings.append(_copies(results))
    fed, plain = (median(getattr(r, name) for r in results) for name in ("fed", "plain"))
    rate = size.batch * size.numbers * 4 / fed / 1e9
    figures = f"{duration(fed)}, {rate:.2g} GB/s a rank; without {duration(plain)}"
    name = "steps/s with batches of the dataset / with one that stays on the device"
    readings.append(speed(name, plain / fed, _LEAST, figures, judge=judge))
    return readings


def _copies(results: Sequence[Fed]) -> VerifyReading:
    kinds = Counter[str]()
    for each in results:
        kinds.update(each.copies)
    seen = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if not kinds:  # CUPTI may be kept from working
        return VerifyReading("copies to the GPU", "torch's profiler saw none", _PINNED)
    return VerifyReading("copies to the GPU", seen, f"{_PINNED} only", set(kinds) == {_PINNED})
