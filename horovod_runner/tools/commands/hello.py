"""The smallest distributed job: every rank reports its place, and all sum numbers.

They sum one number, 64 KB and 64 MB, because MPI moves each of these in another way.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_runner.common.options import ClusterConfig
from horovod_runner.host.gpus import visible_gpus
from horovod_runner.run.runner import HorovodRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_COUNTS = (1, 1 << 14, 1 << 24)  # of float32 numbers


@dataclass(frozen=True)
class Greeting:
    """What one rank reports.

    Attributes:
        total: the sum over all ranks of rank + 1, as this rank received it; NaN if the numbers of
            a larger sum were others.
        device: "cpu", or the GPU's name where the reduction ran on it.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    total: float
    device: str


def hello(framework: str, np: int, spark: SparkSession | None = None) -> list[Greeting]:
    """Run the job with "torch" or "tensorflow"; returns the greetings in rank order.

    On this machine (``np`` below 0) each rank uses a GPU if there are enough; otherwise none does:
    NCCL cannot reduce between two ranks on one GPU.

    Raises:
        HorovodRunnerError: as :meth:`horovod_runner.HorovodRunner.run`.
        ImportError: Horovod was not built for the framework.
    """
    short_of_gpus = np < 0 and len(visible_gpus()) < -np
    gpus = 0 if short_of_gpus else None
    cluster = ClusterConfig(spark=spark)
    runner = HorovodRunner(np=np, gpus_per_rank=gpus, cluster_config=cluster)
    # The frameworks print a lot; a failure is reported by the exception.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        greetings: list[Greeting] = runner.run(_torch if framework == "torch" else _tensorflow)
    return greetings


def _torch() -> list[Greeting]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    use_gpu = torch.cuda.is_available() and hvd.nccl_built()
    device = torch.device("cuda" if use_gpu else "cpu")
    sums = []
    for count in _COUNTS:
        ours = torch.full((count,), hvd.rank() + 1.0, device=device)
        received = hvd.allreduce(ours, op=hvd.Sum)
        sums += [received[0].item(), received[-1].item()]
    name = torch.cuda.get_device_name() if use_gpu else "cpu"
    return _gather(hvd, sums, name)


def _tensorflow() -> list[Greeting]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    use_gpu = bool(tf.config.list_logical_devices("GPU")) and hvd.nccl_built()
    with tf.device("GPU:0" if use_gpu else "CPU:0"):
        sums = []
        for count in _COUNTS:
            received = hvd.allreduce(tf.fill((count,), hvd.rank() + 1.0), op=hvd.Sum)
            sums += [float(received[0]), float(received[-1])]
    name = "cpu"
    if use_gpu:
        physical = tf.config.get_visible_devices("GPU")[0]
        name = tf.config.experimental.get_device_details(physical).get("device_name", "gpu")
    return _gather(hvd, sums, name)


def _gather(hvd: Any, sums: Sequence[float], device: str) -> list[Greeting]:
    """Everybody's greeting, with the ``hvd`` of either framework."""
    host = os.uname().nodename
    total = sums[0] if len(set(sums)) == 1 else math.nan
    greeting = Greeting(hvd.rank(), hvd.size(), hvd.local_rank(), host, total, device)
    greetings: list[Greeting] = hvd.allgather_object(greeting)
    return greetings


def expected_total(greetings: Sequence[Greeting]) -> int:
    """What every rank's ``total`` must be."""
    return sum(range(1, len(greetings) + 1))
