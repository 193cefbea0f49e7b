"""Weights a rank's loss where backward begins, so that a step equals that of one process.

The parts of a global batch may differ by a row. Horovod, DistributedDataParallel and FSDP average
the gradients of the ranks, which is the gradient of the mean over the global batch only if each
rank's mean loss is weighted by its number of rows (:attr:`Feed.weight`). ``Tensor.backward`` calls
``torch.autograd.backward``, which is wrapped here, so the user's loop need not know of it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod_runner.data.feed import inexact
from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.feed.torch_feed import tensors_of
from horovod_runner.errors import DataError


@dataclass
class _FeedLoop:
    """An iteration over a feed."""

    feed: WeightedFeed
    is_open: bool = False  # it has given a batch for training, and has not ended
    is_used: bool = False  # backward was called for one of its batches


@dataclass
class _Batch:
    """A batch for training."""

    loop: _FeedLoop
    weight: float
    tensors: list[weakref.ref[torch.Tensor]]

    def is_alive(self) -> bool:
        """Whether somebody still has a part of it."""
        return any(tensor() is not None for tensor in self.tensors)


class _Drawn:
    """The batches that were drawn and are not done, in order: backward is called for the first.

    Something between the feed and the training may draw batches ahead. So a batch is not done when
    the next one is drawn, but when the thread that has called backward draws another one. Skipped
    batches, and those that another thread draws ahead, are done when all their tensors are gone.
    """

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque()
        self._loops: list[_FeedLoop] = []
        self._used_in: int | None = None  # the thread of a backward since the last draw
        self._lock = threading.Lock()  # another thread may draw

    def add(self, loop: _FeedLoop, batch: Any) -> None:
        """Note that a loop gives a batch."""
        tensors = [weakref.ref(tensor) for tensor in tensors_of(batch)]
        with self._lock:
            if not loop.is_open:
                loop.is_open = True
                self._loops.append(loop)
            self._advance()
            while self._batches and not self._batches[0].is_alive():
                self._batches.popleft()
            self._batches.append(_Batch(loop, loop.feed.weight, tensors))

    def end(self, loop: _FeedLoop, *, left: bool) -> None:
        """Note that a loop has ended, or was left before.

        If it has ended, batches that were drawn ahead are still to come. Without any backward it
        was for something else, such as an evaluation without ``no_grad``.
        """
        with self._lock:
            if not loop.is_open:
                return
            loop.is_open = False
            self._loops.remove(loop)
            self._advance()
            if left or not loop.is_used:
                self._batches = deque(each for each in self._batches if each.loop is not loop)

    def in_use(self) -> _Batch | None:
        """The batch that backward is called for."""
        with self._lock:
            feeds = {id(loop.feed) for loop in self._loops}
            if len(feeds) > 1:
                raise DataError(
                    f"backward() is called in loops over {len(feeds)} feeds with global_batch, and "
                    "a loss can be weighted only for one. If the other feeds are for an "
                    "evaluation, take their batches under torch.no_grad(). To train with several, "
                    "make each with sample_weights=True, and multiply the losses per row by its "
                    "weights"
                )
            # A batch that was converted may have no tensor left: the last one counts nevertheless.
            while self._batches and not self._batches[0].is_alive():
                if len(self._batches) == 1 and self._batches[0].loop.is_open:
                    break
                self._batches.popleft()
            if not self._batches:
                return None
            self._used_in = threading.get_ident()
            return self._batches[0]

    def _advance(self) -> None:
        if self._used_in == threading.get_ident() and self._batches:
            self._batches.popleft()
        self._used_in = None


_drawn = _Drawn()


class WeightedFeed(Feed[Any]):
    """A feed whose weights apply to the losses of its batches, during a loop over it.

    Batches that are taken while gradients are disabled do not count: they are for an evaluation.
    """

    def __iter__(self) -> Iterator[Any]:
        _wrap_backward()
        loop, is_left = _FeedLoop(self), True
        try:
            for batch in super().__iter__():
                if torch.is_grad_enabled():
                    _drawn.add(loop, batch)
                yield batch
            is_left = False
        finally:
            _drawn.end(loop, left=is_left)


def _wrap_backward() -> None:
    plain = torch.autograd.backward
    if hasattr(plain, "weights_losses"):
        return

    @functools.wraps(plain)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        # Inside another backward, as of torch.utils.checkpoint, gradients are weighted already.
        is_outermost = torch._C._current_graph_task_id() == -1
        if is_outermost and (batch := _drawn.in_use()) is not None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if not batch.loop.is_used:
                batch.loop.is_used = True
                inexact.check_graph(batch.loop.feed, roots)
            if batch.weight != 1.0:
                tensors, grad_tensors = roots, _weighted(roots, grad_tensors, batch.weight)
        plain(tensors, grad_tensors, *args, **options)

    backward.weights_losses = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


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
