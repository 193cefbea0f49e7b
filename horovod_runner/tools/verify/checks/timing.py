"""Times systems against each other in the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median


def take_turns(
    systems: Mapping[str, Callable[[], object]], turns: int, count: int
) -> dict[str, float]:
    """Time systems in turns on this rank, after ``hvd.init()``: the median seconds of a call.

    A turn has ``count`` calls. The first one is not counted: it makes buffers and connections, and
    cuDNN chooses its algorithms.
    """
    import horovod.torch as hvd
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for turn in range(turns):
        for system in list(systems) if turn % 2 else list(systems)[::-1]:
            hvd.barrier()
            wait()
            start = time.perf_counter()
            for _ in range(count):
                systems[system]()
            wait()
            if turn:
                seconds[system].append((time.perf_counter() - start) / count)
    return {system: median(each) for system, each in seconds.items()}
