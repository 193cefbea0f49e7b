"""Horovod for Keras 3, on the TensorFlow and the torch backend, with the names of horovod.keras.

Users import it as `horovod_runner.keras`. This ``__init__`` imports nothing at first: a driver
imports it for code that only the ranks run, and may have no Horovod.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_runner.integrations.keras import callbacks, elastic
    from horovod_runner.integrations.keras.distributed.batch_norm import SyncBatchNormalization
    from horovod_runner.integrations.keras.fitting.adapt import adapt
    from horovod_runner.integrations.keras.optimizer import (
        DistributedOptimizer,
        PartialDistributedOptimizer,
        load_model,
    )
    from horovod_runner.integrations.keras.values import (
        Compression,
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        broadcast_variables,
        reducescatter,
    )

# Names that are re-exported from the Horovod of Keras's backend.
_HOROVODS = frozenset(
    {
        *("init", "shutdown", "is_initialized", "start_timeline", "stop_timeline"),
        *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
        *("broadcast_object", "allgather_object"),
        *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
        *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
        *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
        *("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    }
)
_HOMES = {  # of the names that are not in values
    "DistributedOptimizer": "optimizer",
    "PartialDistributedOptimizer": "optimizer",
    "SyncBatchNormalization": "distributed.batch_norm",
    "adapt": "fitting.adapt",
    "load_model": "optimizer",
}

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "adapt",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "elastic"):
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'values')}"), name)
    elif name in _HOROVODS:
        from horovod_runner.integrations.keras.collectives import collectives

        value = getattr(collectives().hvd, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOROVODS})
