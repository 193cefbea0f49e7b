"""Sums of gradients that are sent as bfloat16, which Horovod cannot sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.integrations.compression.whole import WholeGradients

# Numbers that are sent together. While the ranks add one piece up, the next one is on its way.
_PIECE = 1 << 20
# Gradients of this size are sent as soon as they are there, and smaller ones all together.
_LARGE = 1 << 18


class BFloat16(WholeGradients):
    """Sends gradients as bfloat16: float32's exponent and 8 bits of its fraction.

    Each rank receives its part of the gradients from all ranks, sums it in float32, and sends the
    sum to all: the traffic of a 16-bit allreduce.
    """

    name = "bf16"

    def __init__(self) -> None:
        self._begun: dict[str, _Sums] = {}

    def begin(self, name: str, gradient: Any, process_set: Any, prefix: str) -> None:
        """Send a large gradient; see :class:`WholeGradients`."""
        if gradient.numel() >= _LARGE:
            where = {"process_set": process_set}
            self._begun[name] = _Sums([gradient], prefix, process_set.size(), where)

    def reduce(
        self, gradients: Mapping[str, Any], op: Any, process_set: Any, prefix: str
    ) -> dict[str, Any]:
        """Sum or average the gradients of an optimizer; see :class:`WholeGradients`."""
        begun, self._begun = self._begun, {}
        all_sums = [([name], sums) for name, sums in begun.items()]
        if together := [name for name in gradients if name not in begun]:
            tensors = [gradients[name] for name in together]
            where = {"process_set": process_set}
            sums = _Sums(tensors, f"{prefix}.together", process_set.size(), where)
            all_sums.append((together, sums))
        for _, sums in all_sums:
            sums.add(average=op == hvd.Average)
        return {
            name: total
            for names, sums in all_sums
            for name, total in zip(names, sums.finish(), strict=True)
        }


def reduce_bfloat16(
    tensors: Sequence[Any], name: str, size: int, where: Mapping[str, Any], *, average: bool
) -> list[Any]:
    """Sum tensors of floating point numbers over ``size`` ranks, sent as bfloat16.

    They have the same shapes on all ranks, and are overwritten where they are contiguous. ``where``
    is the keyword argument ``process_set`` of the collectives, or nothing.
    """
    sums = _Sums(tensors, name, size, where)
    sums.add(average=average)
    return sums.finish()


class _Sums:
    """Sums of tensors in progress; see :func:`reduce_bfloat16`."""

    def __init__(
        self, tensors: Sequence[Any], name: str, size: int, where: Mapping[str, Any]
    ) -> None:
        self._tensors, self._name, self._size, self._where = tensors, name, size, where
        counts = [tensor.numel() for tensor in tensors]
        padding = -sum(counts) % size
        packed = tensors[0].new_empty(sum(counts) + padding, dtype=torch.bfloat16)
        *self._parts, rest = packed.split([*counts, padding])
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.copy_(tensor.reshape(-1))
        rest.zero_()
        self._pieces = packed.split(-(-_PIECE // size) * size)
        self._exchanges = [
            hvd.alltoall_async(piece.view(torch.float16), name=f"{name}.parts.{number}", **where)
            for number, piece in enumerate(self._pieces)
        ]
        self._gathers: list[int] = []

    def add(self, *, average: bool) -> None:
        """Add up this rank's part of each piece, and send the sums."""
        for number, exchange in enumerate(self._exchanges):
            received, _ = hvd.synchronize(exchange)
            first, *others = received.view(torch.bfloat16).chunk(self._size)
            total = first.float()
            for other in others:
                total += other
            if average:
                total /= self._size
            own = total.to(torch.bfloat16).view(torch.float16)
            name = f"{self._name}.sums.{number}"
            self._gathers.append(hvd.allgather_async(own, name=name, **self._where))

    def finish(self) -> list[Any]:
        """Receive the sums of the other ranks; returns all of them."""
        for piece, gather in zip(self._pieces, self._gathers, strict=True):
            piece.copy_(hvd.synchronize(gather).view(torch.bfloat16))
        targets = [tensor.contiguous() for tensor in self._tensors]
        for part, target in zip(self._parts, targets, strict=True):
            target.copy_(part.reshape(target.shape))
        return targets
