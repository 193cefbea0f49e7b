"""Collectives on values, as horovod.keras has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from horovod_runner.keras.collectives import collectives
from horovod_runner.keras.reduction import BFloat16

_numbers = {kind: itertools.count(1) for kind in ("allreduce", "allgather", "broadcast")}


class _Compressions:
    """What gradients are sent as.

    ``none`` sends them as they are, ``fp16`` as 16 bit numbers with the range of float16, ``bf16``
    with that of float32 and fewer digits.
    """

    bf16 = BFloat16

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
    """Reduce a tensor, or what can become one, over all ranks.

    Args:
        value: of the same shape on all ranks.
        name: of the operation, the same on all ranks.
        average: as ``op``, for older code: True averages, False adds up.
        prescale_factor: what to multiply by before.
        postscale_factor: what to multiply by after.
        op: Average (where none is given), Sum, Min, Max or Product.
        compression: ``Compression.none`` or ``fp16``.

    Returns:
        A tensor of Keras's backend.
    """
    own = collectives()
    if op is None:
        op = own.hvd.Sum if average is False else own.hvd.Average
    if compression is BFloat16:
        raise ValueError("Compression.bf16 is for DistributedOptimizer; here use none or fp16")
    return own.hvd.allreduce(
        own.as_tensor(value),
        name=_named("allreduce", name),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=own.hvd.Compression.none if compression is None else compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' tensors one after the other, along their first dimension.

    Args:
        value: of the same shape on all ranks but for the first dimension.
        name: of the operation, the same on all ranks.
    """
    own = collectives()
    return own.hvd.allgather(own.as_tensor(value), name=_named("allgather", name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """One rank's tensor on all of them.

    Args:
        value: of the same shape on all ranks.
        root_rank: whose.
        name: of the operation, the same on all ranks.
    """
    own = collectives()
    return own.hvd.broadcast(own.as_tensor(value), root_rank, name=_named("broadcast", name))


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Give variables the values that they have on one rank: ``model.weights``, say.

    Args:
        variables: Keras's.
        root_rank: whose values.
    """
    collectives().broadcast_variables(list(variables), root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """There are no global variables on Keras 3.

    Raises:
        NotImplementedError: always; says what to call.
    """
    raise NotImplementedError(
        "Keras 3 keeps no list of all variables: use callbacks.BroadcastGlobalVariablesCallback("
        f"{root_rank}) in model.fit, or broadcast_variables(model.weights, {root_rank}) and "
        f"broadcast_variables(optimizer.variables, {root_rank})"
    )


def _named(kind: str, name: str | None) -> str:
    # Horovod numbers what has no name by all that a rank has done, whatever it was.
    return name or f"horovod_runner.{kind}.{next(_numbers[kind])}"
