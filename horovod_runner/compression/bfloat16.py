"""Sums of gradients that are sent as bfloat16, which Horovod cannot sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.compression.whole import WholeGradients


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
        tensors: of floating point numbers, with the same shapes on all ranks.
        name: of the collectives, the same on all ranks.
        size: the number of ranks that reduce.
        where: the keyword argument ``process_set`` of the collectives, or nothing.
        average: whether to divide the sums by ``size``.

    Returns:
        float32 tensors of the same shapes.
    """
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    part = -(-flat.numel() // size)
    padded = torch.nn.functional.pad(flat, (0, part * size - flat.numel()))
    sent = padded.to(torch.bfloat16).view(torch.float16)
    received = hvd.alltoall(sent, name=f"{name}.parts", **where).view(torch.bfloat16)
    total = received.reshape(size, part).float().sum(0)
    if average:
        total /= size
    packed = total.to(torch.bfloat16).view(torch.float16)
    sums = hvd.allgather(packed, name=f"{name}.sums", **where)
    whole = sums.view(torch.bfloat16).float()[: flat.numel()]
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
