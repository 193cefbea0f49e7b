"""Refuses Adasum at once where Horovod has none: in runs without MPI."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

_FUNCTIONS = ("_allreduce", "_grouped_allreduce", "_allreduce_async", "_grouped_allreduce_async")


def refuse_without_mpi(ops: Any) -> None:
    """Refuse it in the functions that reduce; called with a framework's module ``mpi_ops``."""
    for name in _FUNCTIONS:  # of torch or of TensorFlow
        if hasattr(ops, name):
            setattr(ops, name, _without_adasum(ops, getattr(ops, name)))


def _without_adasum(ops: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    position = list(signature(function).parameters).index("op")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        op = args[position] if len(args) > position else kwargs.get("op")
        if op == ops.Adasum and not ops.mpi_enabled():
            raise ValueError(
                "op=Adasum needs MPI, and Horovod's controller is Gloo in this run. Install MPI "
                '(docs/concepts/collectives.md) and set ClusterConfig(cpu_collectives="mpi"), or '
                "use op=Average"
            )
        return function(*args, **kwargs)

    return call
