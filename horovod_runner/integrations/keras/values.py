"""Collectives on single values, with the signatures of horovod.keras."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.keras.reduction import SentAsBFloat16

_KINDS = ("allreduce", "allgather", "broadcast", "reducescatter")
_counters = {kind: itertools.count(1) for kind in _KINDS}


class _Compressions:
    """The formats in which gradients can be sent.

    ``none`` sends them unchanged, ``fp16`` as float16, ``bf16`` as bfloat16, which has the range of
    float32 and fewer digits.
    """

    bf16 = SentAsBFloat16

    @property
    def none(self) -> Any:
        return collectives().hvd.Compression.none

    @property
    def fp16(self) -> Any:
        return collectives().hvd.Compression.fp16


Compression = _Compressions()


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    """Reduce a value over all ranks.

    Args:
        value: a tensor, array or number, with the same shape on all ranks.
        name: the name of the operation, the same on all ranks; None numbers the calls.
        average: ``op`` for older code: True is Average, False is Sum.
        prescale_factor: multiplies the value before the reduction.
        postscale_factor: multiplies the result.
        op: Average, Sum, Min, Max or Product; None is Average.
        compression: ``Compression.none`` or ``fp16``; None is ``none``.

    Returns:
        A tensor of Keras's backend, with the shape of ``value``.

    Raises:
        ValueError: ``compression`` is ``Compression.bf16``.
    """
    backend = collectives()
    if op is None:
        op = backend.hvd.Average if average is None or average else backend.hvd.Sum
    if compression is SentAsBFloat16:
        raise ValueError("Compression.bf16 works only in DistributedOptimizer: use none or fp16")
    return backend.hvd.allreduce(
        backend.as_tensor(value),
        name=_operation("allreduce", name),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=backend.hvd.Compression.none if compression is None else compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks along the first dimension, in the order of ranks.

    Args:
        value: a tensor or array; all dimensions except the first are the same on all ranks.
        name: the name of the operation, the same on all ranks; None numbers the calls.

    Returns:
        A tensor of Keras's backend.
    """
    backend = collectives()
    return backend.hvd.allgather(backend.as_tensor(value), name=_operation("allgather", name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return one rank's value on all ranks.

    Args:
        value: a tensor, array or number, with the same shape on all ranks.
        root_rank: the rank whose value is returned.
        name: the name of the operation, the same on all ranks; None numbers the calls.

    Returns:
        A tensor of Keras's backend.
    """
    backend = collectives()
    operation = _operation("broadcast", name)
    return backend.hvd.broadcast(backend.as_tensor(value), root_rank, name=operation)


def reducescatter(value: Any, name: str | None = None, op: Any = None) -> Any:
    """Reduce a value over all ranks, and return this rank's part of the result.

    Args:
        value: a tensor or array, with the same shape on all ranks.
        name: the name of the operation, the same on all ranks; None numbers the calls.
        op: Average or Sum; None is Average.

    Returns:
        A tensor of Keras's backend: one of ``hvd.size()`` parts along the first dimension, in the
        order of ranks. If it cannot be split evenly, the first ranks have a row more.
    """
    backend = collectives()
    return backend.hvd.reducescatter(
        backend.as_tensor(value),
        name=_operation("reducescatter", name),
        op=backend.hvd.Average if op is None else op,
    )


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Set variables on all ranks to one rank's values.

    The states of random generators, which ``model.variables`` includes, stay as they are: each rank
    draws its own dropout.

    Args:
        variables: variables of Keras, such as ``model.weights``.
        root_rank: the rank whose values are used.
    """
    weights = [variable for variable in variables if not is_seed(variable)]
    collectives().broadcast_variables(weights, root_rank)


def is_seed(variable: Any) -> bool:
    """Whether a variable, or TensorFlow's inside of it, is the state of a ``SeedGenerator``.

    Its name says so. Its type depends on the backend and on the release: uint32, int32 or int64.
    """
    name = str(getattr(variable, "name", ""))
    return name.rpartition("/")[2].partition(":")[0] == "seed_generator_state"


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: Keras 3 has no global variables.

    Raises:
        NotImplementedError: always; the text says what to call instead.
    """
    raise NotImplementedError(
        "Keras 3 has no list of all variables: use callbacks.BroadcastGlobalVariablesCallback("
        f"{root_rank}) in model.fit, or broadcast_variables(model.weights, {root_rank}) and "
        f"broadcast_variables(optimizer.variables, {root_rank})"
    )


def _operation(kind: str, name: str | None) -> str:
    # Horovod numbers unnamed operations over all kinds, and ranks may differ in other kinds.
    return name or f"horovod_runner.{kind}.{next(_counters[kind])}"
