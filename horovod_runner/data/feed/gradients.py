"""Weights a rank's loss where backward begins, so that a step equals that of one process.

The parts of a global batch may differ by a row. Horovod, DistributedDataParallel and FSDP average
the gradients of the ranks, which is the gradient of the mean over the global batch only if each
rank's mean loss is weighted by its number of rows (:attr:`Feed.weight`). ``Tensor.backward`` calls
``torch.autograd.backward``, which is wrapped here, so the user's loop need not know of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod_runner.data.feed import inexact
from horovod_runner.data.feed.feed import Feed
from horovod_runner.errors import DataError


@dataclass
class _Iteration:
    """An iteration over a feed that has given a batch and has not ended."""

    feed: WeightedFeed
    is_checked: bool = False  # whether a loss was searched for batch normalization


_iterations: dict[object, _Iteration] = {}


class WeightedFeed(Feed[Any]):
    """A feed whose weight applies to all losses during a loop over it.

    Batches that are taken while gradients are disabled do not count: they are for an evaluation.
    """

    def __iter__(self) -> Iterator[Any]:
        _wrap_backward()
        iteration, key = _Iteration(self), object()
        try:
            for batch in super().__iter__():
                if torch.is_grad_enabled():
                    _iterations[key] = iteration
                yield batch
        finally:
            _iterations.pop(key, None)


def _wrap_backward() -> None:
    plain = torch.autograd.backward
    if hasattr(plain, "weights_losses"):
        return

    @functools.wraps(plain)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        # Inside another backward, as of torch.utils.checkpoint, gradients are weighted already.
        is_outermost = torch._C._current_graph_task_id() == -1
        if _iterations and is_outermost:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            weight = _weight_of(roots)
            if weight != 1.0:
                tensors, grad_tensors = roots, _weighted(roots, grad_tensors, weight)
        plain(tensors, grad_tensors, *args, **options)

    backward.weights_losses = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _weight_of(roots: Sequence[Any]) -> float:
    """The weight of the feed whose loop calls backward.

    Raises:
        DataError: there are loops over several feeds.
    """
    iterations = list(_iterations.values())
    feed = iterations[-1].feed
    others = {id(iteration.feed) for iteration in iterations} - {id(feed)}
    if others:
        raise DataError(
            f"backward() is called in loops over {len(others) + 1} feeds with global_batch, and a "
            "loss can be weighted only for one. If the other feeds are for an evaluation, take "
            "their batches under torch.no_grad(). To train with several, make each with "
            "sample_weights=True, and multiply the losses per row by its weights"
        )
    for iteration in iterations:
        if not iteration.is_checked:
            iteration.is_checked = True
            inexact.check_graph(feed, roots)
    return feed.weight


def _weighted(roots: Sequence[Any], gradients: Any, weight: float) -> list[Any]:
    """The gradients with which backward begins, times the weight."""
    if gradients is None:
        gradients = [None] * len(roots)
    elif isinstance(gradients, torch.Tensor):
        gradients = [gradients]
    return [_times(root, given, weight) for root, given in zip(roots, gradients, strict=True)]


def _times(root: Any, gradient: Any, weight: float) -> Any:
    if gradient is not None:
        return gradient * weight
    if isinstance(root, torch.Tensor) and root.numel() == 1:
        return torch.full_like(root, weight, requires_grad=False)
    return None  # torch's own error follows
