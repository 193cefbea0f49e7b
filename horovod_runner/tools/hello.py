"""The smallest distributed job: every rank reports its place, and all sum numbers.

They sum one number, 64 KB and 64 MB, because MPI moves each of these in another way.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.common.options import ClusterConfig
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host.gpus import visible_gpus
from horovod_runner.run.runner import HorovodRunner
from horovod_runner.worker.api import log_to_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: How many float32 numbers are summed, by the size's name.
COUNTS: Final[Mapping[str, int]] = {"one number": 1, "64 KB": 1 << 14, "64 MB": 1 << 24}
_INIT = "called hvd.init()"
_BEGINS = "hello:"


class HelloError(HorovodRunnerError):
    """The job failed after the imports; the text says at which size of a message."""


@dataclass(frozen=True)
class Greeting:
    """The report of one rank."""

    rank: int
    size: int
    local_rank: int
    host: str
    total: float  # the sum over all ranks of rank + 1, as received; NaN if sizes brought others
    device: str  # "cpu", or the GPU's name where the reduction ran on it
    wrong: tuple[str, ...] = ()  # the sizes of messages that brought other numbers


def hello(framework: str, np: int, spark: SparkSession | None = None) -> list[Greeting]:
    """Run the job with "torch" or "tensorflow"; returns the greetings in rank order.

    On this machine (``np`` below 0) each rank uses a GPU if there are enough; otherwise none does:
    NCCL cannot reduce between two ranks on one GPU.

    Raises:
        HelloError: a rank failed in ``hvd.init()`` or in a reduction.
        HorovodRunnerError: as :meth:`horovod_runner.HorovodRunner.run`.
        ImportError: Horovod was not built for the framework.
    """
    gpus = 0 if np < 0 and len(visible_gpus()) < -np else None
    runner = HorovodRunner(np=np, gpus_per_rank=gpus, cluster_config=ClusterConfig(spark=spark))
    # The frameworks print a lot; a failure is reported by the exception.
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()):
        try:
            greetings: list[Greeting] = runner.run(_torch if framework == "torch" else _tensorflow)
        except HorovodRunnerError as error:
            _, found, begun = shown.getvalue().rpartition(_BEGINS)
            if not found:
                raise
            step = begun.splitlines()[0].strip()
            raise HelloError(f"failed when the ranks {step}: {error.__cause__ or error}") from error
    return greetings


def _torch() -> list[Greeting]:
    import horovod.torch as hvd
    import torch

    log_to_driver(f"{_BEGINS} {_INIT}")
    hvd.init()
    use_gpu = torch.cuda.is_available() and hvd.nccl_built()
    device = torch.device("cuda" if use_gpu else "cpu")

    def reduce(count: int) -> tuple[float, float]:
        ours = torch.full((count,), hvd.rank() + 1.0, device=device)
        received = hvd.allreduce(ours, op=hvd.Sum)
        return received[0].item(), received[-1].item()

    return _greet(hvd, reduce, torch.cuda.get_device_name() if use_gpu else "cpu")


def _tensorflow() -> list[Greeting]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    log_to_driver(f"{_BEGINS} {_INIT}")
    hvd.init()
    use_gpu = bool(tf.config.list_logical_devices("GPU")) and hvd.nccl_built()

    def reduce(count: int) -> tuple[float, float]:
        with tf.device("GPU:0" if use_gpu else "CPU:0"):
            received = hvd.allreduce(tf.fill((count,), hvd.rank() + 1.0), op=hvd.Sum)
            return float(received[0]), float(received[-1])

    name = "cpu"
    if use_gpu:
        physical = tf.config.get_visible_devices("GPU")[0]
        name = tf.config.experimental.get_device_details(physical).get("device_name", "gpu")
    return _greet(hvd, reduce, name)


def _greet(hvd: Any, reduce: Callable[[int], tuple[float, float]], device: str) -> list[Greeting]:
    """Sum a message of each size with ``reduce``, which returns the first and the last sum."""
    sums = {}
    for name, count in COUNTS.items():
        log_to_driver(f"{_BEGINS} summed {name}")
        sums[name] = reduce(count)
    expected = float(sum(range(1, hvd.size() + 1)))
    wrong = tuple(name for name, both in sums.items() if {*both} != {expected})
    received = {number for both in sums.values() for number in both}
    total = received.pop() if len(received) == 1 else math.nan
    host = os.uname().nodename
    greeting = Greeting(hvd.rank(), hvd.size(), hvd.local_rank(), host, total, device, wrong)
    greetings: list[Greeting] = hvd.allgather_object(greeting)
    return greetings


def expected_total(greetings: Sequence[Greeting]) -> int:
    """The right ``total`` of every rank."""
    return sum(range(1, len(greetings) + 1))
