"""Run after run in one process, as in a notebook that lives for weeks."""

from __future__ import annotations

import gc
import os
import threading

import psutil
import pytest

from horovod_runner import HorovodRunner, report, save_checkpoint
from horovod_runner.sinks import Sink

pytestmark = pytest.mark.usefixtures("nothing_left")

_RUNS = 24
_BEFORE = 12  # what allocators and caches keep, they have by then
_GROWTH_BYTES = 10e6


def train(fail: bool) -> bytes:
    for step in range(100):
        report(loss=1.0, step=step)
    save_checkpoint(bytes(1_000_000), 1)
    if fail:
        raise ValueError("on purpose")
    return bytes(1000)


# Slow: what a run leaves shows only after some dozens of them.
def test_run_after_run_leaves_nothing() -> None:
    own, sizes, counts = psutil.Process(), [], []
    for number in range(_RUNS):
        runner = HorovodRunner(np=-1, sinks=[Sink()], gpus_per_rank=0)
        try:
            assert runner.run(train, fail=number % 6 == 0) == bytes(1000)
        except ValueError:
            assert number % 6 == 0
        assert len(runner.last_run.checkpoints) == 1
        del runner
        gc.collect()
        sizes.append(own.memory_info().rss)
        sockets = len(own.net_connections())
        counts.append((threading.active_count(), sockets, len(os.listdir("/proc/self/fd"))))
    assert counts[-1] == counts[0]
    assert max(sizes[_BEFORE:]) - sizes[_BEFORE - 1] < _GROWTH_BYTES
