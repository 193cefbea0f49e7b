"""Horovod's collectives for Keras on torch, with the names of tensorflow_collectives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.integrations.compression.bfloat16 import reduce_bfloat16
from horovod_runner.integrations.keras.reduction import (
    Completed,
    Groups,
    Reduction,
    SentAsBFloat16,
    by_type,
)

# Types that Horovod cannot send, and types of the same size that carry their bits.
_SENT_AS = {torch.bfloat16: torch.float16, torch.uint32: torch.int32, torch.bool: torch.uint8}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_gradients(
    gradients: Sequence[Any],
    name: str,
    how: Reduction,
    groups: Groups = None,
    alike: Any = None,
) -> list[Any]:
    """Reduce gradients over the ranks; the arguments are those of tensorflow_collectives.

    Sparse gradients are always sent as dense ones.
    """
    del alike
    with torch.no_grad():
        dense = [g.to_dense() if g.is_sparse else g for g in gradients]
        types = [tensor.dtype for tensor in dense]
        if how.compression is SentAsBFloat16:
            average = how.op == hvd.Average
            reduced = reduce_bfloat16(dense, name, how.size(hvd), how.where(), average=average)
        else:
            # Horovod cannot sum bfloat16.
            wide = [t.float() if t.dtype == torch.bfloat16 else t for t in dense]
            packed = [how.compression.compress(tensor.contiguous()) for tensor in wide]
            sent = _reduce_all([tensor for tensor, _ in packed], name, how, groups)
            pairs = zip(sent, packed, strict=True)
            reduced = [how.compression.decompress(tensor, ctx) for tensor, (_, ctx) in pairs]
        return [tensor.to(dtype) for tensor, dtype in zip(reduced, types, strict=True)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_finite(finite: Any, name: str, how: Reduction) -> Any:
    """Return whether a flag is true on all ranks that reduce."""
    flag = torch.as_tensor(finite).reshape(1).float()
    return hvd.allreduce(flag, op=hvd.Min, name=f"{name}.finite", **how.where())[0] > 0.5


@torch.compiler.disable  # type: ignore[untyped-decorator]
def complete(
    gradients: Sequence[Any], variables: Sequence[Any], name: str, how: Reduction
) -> Completed:
    """Fill in zeros for the gradients that this rank lacks; see tensorflow_collectives."""
    there = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)
    handle = hvd.allreduce_async(there, name=f"{name}.there", op=hvd.Sum, **how.where())
    wait = torch.compiler.disable(cache(lambda: hvd.synchronize(handle)))
    filled = [
        torch.zeros_like(variable.value) if gradient is None else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    return Completed(filled, wait, None)


def differentiate(loss: Any, variables: Sequence[Any], tape: Any = None) -> list[Any]:
    """Raise NotImplementedError: torch has no tape."""
    raise NotImplementedError(
        "compute_gradients needs TensorFlow's GradientTape. On torch call loss.backward(), and "
        "optimizer.apply([v.value.grad for v in model.trainable_variables]), which averages them"
    )


def graph() -> Any:
    """Return "eager": torch builds no graph."""
    return "eager"


def scale(values: Sequence[Any], factor: float) -> list[Any]:
    """Multiply tensors by a number."""
    return [value * factor for value in values]


def scale_variables(variables: Sequence[Any], factor: float) -> None:
    """Multiply variables by a number."""
    with torch.no_grad():
        torch._foreach_mul_([variable.value.data for variable in variables], factor)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Set Keras's variables to one rank's values."""
    handles = [
        hvd.broadcast_async_(
            _sendable(variable.value.data), root_rank, name=f"horovod_runner.broadcast.{index}"
        )
        for index, variable in enumerate(variables)
    ]
    for handle in handles:
        hvd.synchronize(handle)


def average(numbers: Sequence[float], name: str) -> list[float]:
    """Average numbers over the ranks."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return [float(number) for number in hvd.allreduce(tensor, op=hvd.Average, name=name)]


def average_with_gradient(tensor: Any, name: str) -> Any:
    """Average a tensor over the ranks, as a differentiable operation."""
    return _Average.apply(tensor, name)


class _Average(torch.autograd.Function):  # type: ignore[misc]
    # Horovod's own gradient has a name that may differ between ranks.

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(ctx: Any, tensor: Any, name: str) -> Any:
        ctx.name = name
        return hvd.allreduce(tensor, op=hvd.Average, name=name)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Any) -> tuple[Any, None]:
        return hvd.allreduce(upstream, op=hvd.Average, name=f"{ctx.name}.gradient"), None


def gather(numbers: Sequence[int], name: str) -> list[list[int]]:
    """Return the numbers of all ranks, in the order of ranks."""
    row = torch.tensor([numbers], dtype=torch.int64, device="cpu")
    return [[int(number) for number in row] for row in hvd.allgather(row, name=name)]


def can_join() -> bool:
    """Return whether ``join`` of this Horovod waits: true on torch."""
    return True


def join() -> None:
    """Wait for all ranks; meanwhile contribute zeros to their reductions."""
    on_gpu = hvd.nccl_built() and torch.cuda.is_available()  # a rank may have none
    hvd.join(torch.cuda.current_device() if on_gpu else -1)


def as_tensor(value: Any) -> Any:
    """Convert a value to a tensor."""
    return torch.as_tensor(value)


def _reduce_all(tensors: list[Any], name: str, how: Reduction, groups: Groups) -> list[Any]:
    options = how.options(hvd)
    if groups is None:
        handles = [
            hvd.allreduce_async_(tensor, name=f"{name}.{index}", **options)
            for index, tensor in enumerate(tensors)
        ]
        return [hvd.synchronize(handle) for handle in handles]
    split = by_type(groups, {index: tensor.dtype for index, tensor in enumerate(tensors)})
    handles = [
        hvd.grouped_allreduce_async_(
            [tensors[index] for index in group], name=f"{name}.group.{number}", **options
        )
        for number, group in enumerate(split)
    ]
    reduced: dict[int, Any] = {}
    for group, handle in zip(split, handles, strict=True):
        reduced.update(zip(group, hvd.synchronize(handle), strict=True))
    return [reduced[index] for index in range(len(tensors))]


def _sendable(tensor: Any) -> Any:
    sent_as = _SENT_AS.get(tensor.dtype)
    return tensor if sent_as is None else tensor.view(sent_as)
