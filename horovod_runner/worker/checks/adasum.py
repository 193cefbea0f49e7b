"""Refuses Adasum at once where Horovod has none: in runs without MPI."""

from __future__ import annotations

from inspect import signature
from typing import Any

from horovod_runner.worker.imports.patches import instead_of

_FUNCTIONS = ("_allreduce", "_grouped_allreduce", "_allreduce_async", "_grouped_allreduce_async")


def refuse_without_mpi(ops: Any) -> None:
    """Refuse it in the functions that reduce; called with a framework's module ``mpi_ops``."""
    for name in _FUNCTIONS:  # of torch or of TensorFlow
        if hasattr(ops, name):
            _refuse(ops, name)


def _refuse(ops: Any, name: str) -> None:
    position = list(signature(getattr(ops, name)).parameters).index("op")

    @instead_of(ops, name)
    def call(plain: Any, *args: Any, **options: Any) -> Any:
        op = args[position] if len(args) > position else options.get("op")
        if op == ops.Adasum and not ops.mpi_enabled():
            raise ValueError(
                "op=Adasum needs MPI, and Horovod's controller is Gloo in this run. Install MPI "
                '(docs/concepts/collectives.md) and set ClusterConfig(cpu_collectives="mpi"), or '
                "use op=Average"
            )
        return plain(*args, **options)
