"""Broadcasts the state of an optimizer of PyTorch from one rank to the others.

Horovod's own function lets a new optimizer make a step with gradients of 0, to have a state that
the other ranks' values can be written into. It moves weights by their decay, and steps of the
training are counted from 1. It also fails with LBFGS and with sparse momentums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from horovod_runner.worker.checks.models import check_same_model
from horovod_runner.worker.imports.patches import instead_of


class _TensorPlace(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    on_cpu: bool


def mend(module: Any) -> None:
    """Change the functions of a module, which is ``horovod.torch.functions``."""

    @instead_of(module, "broadcast_parameters")
    def broadcast_parameters(
        plain: Any, params: Any, root_rank: int, *args: Any, **options: Any
    ) -> None:
        given = params.items() if isinstance(params, dict) else params
        named = [each if isinstance(each, tuple) else (None, each) for each in given]
        sent, copies = [], []
        for name, tensor in named:
            is_laid_out = not hasattr(tensor, "is_contiguous") or tensor.is_sparse
            if is_laid_out or tensor.is_contiguous():
                sent.append((name, tensor))
            else:  # Horovod refuses it
                copies.append((tensor, tensor.detach().contiguous()))
                sent.append((name, copies[-1][1]))
        if not args and not options:  # otherwise the ranks of a process set
            check_same_model(
                (f"weight {number}" if name is None else str(name), getattr(tensor, "shape", ()))
                for number, (name, tensor) in enumerate(sent)
            )
        plain(sent, root_rank, *args, **options)
        for tensor, copy in copies:
            tensor.data.copy_(copy)

    def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
        """Give all ranks the state of one rank's optimizer, and its options such as ``lr``.

        Before the first step nobody has a state. ``model`` is not used; Horovod's own function
        looks for sparse weights in it.

        Raises:
            ValueError: this rank's optimizer has other groups of weights than the root's.
        """
        _broadcast(module, optimizer, root_rank)

    module.broadcast_optimizer_state = broadcast_optimizer_state


def _broadcast(module: Any, optimizer: Any, root_rank: int) -> None:
    from horovod.torch import mpi_ops

    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    is_root = mpi_ops.rank() == root_rank
    tensors: list[Any] = []
    own = None
    if is_root:
        numbers = {weight: number for number, weight in enumerate(weights)}
        state = {numbers[weight]: values for weight, values in optimizer.state.items()}
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        own = (_map(state, functools.partial(_take, tensors)), options, own_sizes)
    state, options, sizes = module.broadcast_object(own, root_rank, name="optimizer state")
    if own_sizes != sizes:
        raise ValueError(
            f"rank {root_rank}'s optimizer has groups of {sizes} weights, and this rank's of "
            f"{own_sizes}: make the same optimizer on all ranks before its state is broadcast"
        )
    received: list[Any] = []
    for number, values in state.items():
        make = functools.partial(_make, received, weights[number])
        state[number] = _map(values, make)
    sent = tensors if is_root else received
    handles = [
        mpi_ops.broadcast_async_(_bytes(tensor), root_rank, name=f"optimizer state {number}")
        for number, tensor in enumerate(sent)
        if tensor.numel()
    ]
    for handle in handles:
        mpi_ops.synchronize(handle)
    if is_root:
        return
    optimizer.state.clear()
    optimizer.state.update({weights[number]: values for number, values in state.items()})
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to what is in dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(each, function) for each in value)
    return function(value)


def _take(tensors: list[Any], value: Any) -> Any:
    """Replace a tensor by its place, and append it to a list."""
    import torch

    # Sparse tensors are pickled with the rest.
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return value
    tensors.append(value.detach().contiguous())
    on_cpu = value.device.type == "cpu"
    return _TensorPlace(tuple(value.shape), value.dtype, on_cpu)


def _make(tensors: list[Any], weight: Any, value: Any) -> Any:
    """Make an empty tensor for a place, and append it to a list."""
    import torch

    if not isinstance(value, _TensorPlace):
        return value
    device = "cpu" if value.on_cpu else weight.device
    tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
    return tensors[-1]


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8)
