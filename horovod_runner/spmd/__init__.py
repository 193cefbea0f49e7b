"""Training inside a program whose ranks already run: under mpirun, srun, horovodrun, or in Spark.

The calls are those of ``bodo.dl``, which Bodo had until its 2022 releases. No other package
imports this one.
"""

from horovod_runner.spmd.calls import (
    end,
    initialized,
    is_cuda_available,
    prepare_data,
    rank,
    size,
    start,
)

__all__ = [
    "end",
    "initialized",
    "is_cuda_available",
    "prepare_data",
    "rank",
    "size",
    "start",
]
