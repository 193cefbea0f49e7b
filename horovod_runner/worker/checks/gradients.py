"""Finds gradients that are clipped or unscaled before Horovod has averaged them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from horovod_runner.worker.checks import notes

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def watch_horovod(module: Any) -> None:
    """Remember Horovod's optimizers, and refuse to wrap one twice.

    Called with the module ``horovod.torch.optimizer``. Their ``zero_grad`` also gets the argument
    that PyTorch's has.
    """
    kind = module._DistributedOptimizer
    plain, plain_zero = kind.__init__, kind.zero_grad

    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        _optimizers.add(self)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self._handles:
            plain_zero(self)  # raises Horovod's error
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)

    kind.__init__, kind.zero_grad = init, zero_grad
    plain_wrap = module.DistributedOptimizer

    @functools.wraps(plain_wrap)
    def wrap(optimizer: Any, *args: Any, **options: Any) -> Any:
        if hasattr(optimizer, "_allreduce_delay"):
            raise ValueError(
                f"this {type(optimizer).__name__} is distributed already: call "
                "DistributedOptimizer only once"
            )
        return plain_wrap(optimizer, *args, **options)

    module.DistributedOptimizer = wrap


def watch_clipping(module: Any) -> None:
    """Watch the functions that clip; called with the module ``torch.nn.utils.clip_grad``."""
    for name in _CLIPS:
        if hasattr(module, name):
            setattr(module, name, _watched(getattr(module, name)))


def _watched(clip: Any) -> Any:
    @functools.wraps(clip)
    def call(parameters: Any, *args: Any, **options: Any) -> Any:
        if _optimizers:
            if isinstance(parameters, Iterator):
                parameters = list(parameters)  # it can be read only once
            _check_clip(parameters, clip.__name__)
        return clip(parameters, *args, **options)

    return call


def _check_clip(parameters: Any, name: str) -> None:
    own = parameters if isinstance(parameters, list | tuple) else [parameters]
    if any(optimizer._handles and _has(optimizer, own[:1]) for optimizer in list(_optimizers)):
        notes.send(
            "mistake",
            "clipping",
            f"{name} clips gradients that are not averaged yet, so each rank clips by its own "
            "norm. Call optimizer.synchronize() before it, and then the step as "
            "`with optimizer.skip_synchronize(): optimizer.step()`.",
            once=True,
        )


def _has(optimizer: Any, parameters: Iterable[Any]) -> bool:
    return any(own is given for given in parameters for own in optimizer._allreduce_delay)


def watch_scaling(module: Any) -> None:
    """Watch gradient scalers; called with the module ``torch.amp.grad_scaler``."""
    plain = module.GradScaler.unscale_

    @functools.wraps(plain)
    def unscale(self: Any, optimizer: Any) -> None:
        if getattr(optimizer, "_handles", None) and hasattr(optimizer, "_allreduce_delay"):
            notes.send(
                "mistake",
                "unscaling",
                "GradScaler unscales gradients that are not averaged yet: where one rank's "
                "overflow, it alone skips the step, and the others wait for it. Call "
                "optimizer.synchronize() before scaler.unscale_(optimizer), and then the step as "
                "`with optimizer.skip_synchronize(): scaler.step(optimizer)`.",
                once=True,
            )
        plain(self, optimizer)

    module.GradScaler.unscale_ = unscale
