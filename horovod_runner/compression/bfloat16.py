"""Sums of gradients that are sent as bfloat16, which Horovod cannot sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.compression.whole import WholeGradients

# Numbers that are sent together. While the ranks add one piece up, the next one is on its way.
_PIECE = 1 << 20


class BFloat16(WholeGradients):
    """Sends gradients as bfloat16: float32's exponent and 8 bits of its fraction.

    Each rank receives its part of the gradients from all ranks, sums it in float32, and sends the
    sum to all: the traffic of a 16-bit allreduce.
    """

    name = "bf16"

    def reduce(
        self, gradients: Mapping[str, Any], op: Any, process_set: Any, prefix: str
    ) -> dict[str, Any]:
        """Sum or average the gradients of an optimizer; see :class:`WholeGradients`."""
        where = {"process_set": process_set}
        average = op == hvd.Average
        sums = reduce_bfloat16(
            list(gradients.values()), prefix, process_set.size(), where, average=average
        )
        return dict(zip(gradients, sums, strict=True))


def reduce_bfloat16(
    tensors: Sequence[Any], name: str, size: int, where: Mapping[str, Any], *, average: bool
) -> list[Any]:
    """Sum tensors over the ranks, sent as bfloat16.

    Args:
        tensors: of floating point numbers, with the same shapes on all ranks. They are overwritten.
        name: of the collectives, the same on all ranks.
        size: the number of ranks that reduce.
        where: the keyword argument ``process_set`` of the collectives, or nothing.
        average: whether to divide the sums by ``size``.

    Returns:
        The sums: the tensors themselves, or new ones in place of those that are not contiguous.
    """
    counts = [tensor.numel() for tensor in tensors]
    padding = -sum(counts) % size
    packed = tensors[0].new_empty(sum(counts) + padding, dtype=torch.bfloat16)
    *parts, rest = packed.split([*counts, padding])
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor.reshape(-1))
    rest.zero_()
    pieces = packed.split(-(-_PIECE // size) * size)
    exchanges = [
        hvd.alltoall_async(piece.view(torch.float16), name=f"{name}.parts.{number}", **where)
        for number, piece in enumerate(pieces)
    ]
    gathers = []
    for number, exchange in enumerate(exchanges):
        received, _ = hvd.synchronize(exchange)
        first, *others = received.view(torch.bfloat16).chunk(size)
        total = first.float()
        for other in others:
            total += other
        if average:
            total /= size
        own = total.to(torch.bfloat16).view(torch.float16)
        gathers.append(hvd.allgather_async(own, name=f"{name}.sums.{number}", **where))
    for piece, gather in zip(pieces, gathers, strict=True):
        piece.copy_(hvd.synchronize(gather).view(torch.bfloat16))
    targets = [tensor.contiguous() for tensor in tensors]
    for part, target in zip(parts, targets, strict=True):
        target.copy_(part.reshape(target.shape))
    return targets
