"""Averages the gradients of Horovod's optimizers before they are clipped or unscaled.

Horovod averages gradients in ``optimizer.step()`` at the latest. ``clip_grad_norm_`` and
``GradScaler`` look at them before that. On gradients that are not averaged yet, each rank would
clip by a norm of its own, and would skip the steps in which its own gradients overflow while the
others wait for it. Here both call ``optimizer.synchronize()`` first, and the step does not average
again. A rank that has left out ``backward`` does so too: the others wait for it, and all have to
clip alike. Where more gradients are to be accumulated first, ``step`` clips after it has averaged.
Horovod's own pattern, ``synchronize`` and ``skip_synchronize``, works as before.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from horovod_runner.worker.checks import notes
from horovod_runner.worker.checks.optimizers import average_gradients, forget_gradients
from horovod_runner.worker.imports.patches import instead_of

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
_strategies: weakref.WeakSet[Any] = weakref.WeakSet()
_made = itertools.count()
_clipping = threading.local()  # it has "now" while a clip asks for a norm
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def mend_horovod(module: Any) -> None:
    """Let optimizers average gradients early, and refuse to wrap one twice.

    Called with the module ``horovod.torch.optimizer``. The optimizers' ``zero_grad`` also takes
    the arguments that the plain optimizer's takes.
    """
    kind = module._DistributedOptimizer

    @instead_of(kind, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        self._averaged_early = self._forgot = self._others_averaged = False
        self._clips_later, self._number = {}, next(_made)
        plain(self, *args, **options)
        _optimizers.add(self)

    def zero_grad(self: Any, *args: Any, **options: Any) -> None:
        self._others_averaged = False
        if self._handles:
            forget_gradients(self)
            self._synchronized = False
            self._forgot = True
        if self._averaged_early:  # the step was left out
            self._averaged_early = self._synchronized = False
        super(self.__class__, self).zero_grad(*args, **options)

    kind.zero_grad = zero_grad

    @instead_of(kind, "synchronize")
    def synchronize(plain: Any, self: Any) -> None:
        if self._averaged_early and not self._handles:
            return
        self._forgot = self._forgot and not self._handles
        plain(self)

    @instead_of(kind, "step")
    def step(plain: Any, self: Any, closure: Any = None) -> Any:
        is_averaged = self._averaged_early and not self._handles
        self._averaged_early = False
        if self._forgot and not self._handles and closure is None:
            notes.mistake(
                "forgotten gradients",
                "a step had no gradients, because zero_grad() was called between backward() and "
                "step(). Call it before backward(), or after step().",
            )
        self._forgot = False
        if closure is not None and self._should_synchronize:
            closure = _averages(self, closure)
            is_averaged = True
        else:
            if self._clips_later and self._should_synchronize and not is_averaged:
                self.synchronize()
                is_averaged = True
            _clip_now(self)
            self._others_averaged = False
        with self.skip_synchronize() if is_averaged else nullcontext():
            return plain(self, closure)

    @instead_of(module, "DistributedOptimizer")
    def wrap(plain: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        if hasattr(optimizer, "_allreduce_delay"):
            raise ValueError(
                f"this {type(optimizer).__name__} is distributed already: call "
                "DistributedOptimizer only once"
            )
        return plain(optimizer, *args, **options)


def _averages(optimizer: Any, closure: Any) -> Any:
    """A closure of ``step`` that also averages: the gradients, and the loss that it returns."""

    @functools.wraps(closure)
    def averaged() -> Any:
        from horovod.torch.mpi_ops import allreduce

        loss = closure()
        optimizer.synchronize()
        optimizer._averaged_early = optimizer._synchronized = False
        _clip_now(optimizer)
        optimizer._others_averaged = False
        process_set = optimizer.process_set
        if hasattr(loss, "detach") and process_set.included() and process_set.size() > 1:
            # LBFGS decides by it, on all ranks alike.
            name = f"loss {min(optimizer._parameter_names.values())}"
            return allreduce(loss.detach(), name=name, op=optimizer.op, process_set=process_set)
        return loss

    return averaged


def _clip_now(optimizer: Any) -> None:
    for clip in optimizer._clips_later.values():
        clip()
    optimizer._clips_later.clear()


def _average(optimizer: Any) -> None:
    """Average an optimizer's gradients now instead of in its next step."""
    optimizer.synchronize()
    optimizer._averaged_early = True


def average_in_clips(strategy: Any) -> None:
    """Call ``strategy.average_before_clip(parameters)`` before gradients are clipped."""
    _strategies.add(strategy)


def mend_clipping(module: Any) -> None:
    """Average gradients before they are clipped; called with ``torch.nn.utils.clip_grad``."""
    for name in _CLIPS:
        _average_before_clip(module, name)
    if hasattr(module, "_get_total_norm"):  # torch 2.6 and later
        _measure_averages(module)


def _average_before_clip(module: Any, name: str) -> None:
    @instead_of(module, name)
    def call(plain: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        def clip(parameters: Any, *args: Any, **options: Any) -> Any:
            _clipping.now = True
            try:
                return plain(parameters, *args, **options)
            finally:
                _clipping.now = False

        if not _optimizers and not _strategies:
            return clip(parameters, *args, **options)
        own = _listed(parameters)
        for strategy in list(_strategies):
            strategy.average_before_clip(own)
        owners = _owners(own)
        what = (name, *map(id, own))
        for optimizer in owners:  # all ranks clip once, the last time that they are asked to
            optimizer._clips_later.pop(what, None)
        accumulating = _average_unless_accumulating(owners)

        def clip_averages() -> Any:
            _average_others(own, owners)
            return clip(own, *args, **options)

        if not accumulating:
            return clip_averages()
        for optimizer in accumulating:
            optimizer._clips_later[what] = clip_averages
        if name == "clip_grad_norm_":  # of the norm so far, which the caller may print
            rest = {name: value for name, value in options.items() if name != "max_norm"}
            return clip(own, math.inf, *args[1:], **rest)
        return None


def _measure_averages(module: Any) -> None:
    @instead_of(module, "_get_total_norm")
    def get_total_norm(plain: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        if _optimizers:
            tensors = _listed(tensors)
            owners = _owners(tensors)
            if owners and not getattr(_clipping, "now", False):
                _note_others(tensors, owners)
            # Averages are written into the gradients, which stay the same tensors.
            for optimizer in _average_unless_accumulating(owners):
                if not optimizer._clips_later:  # otherwise a clip calls this function
                    _note_own_norm(optimizer)
        return plain(tensors, *args, **options)


def _listed(tensors: Any) -> list[Any]:
    """A list of what torch takes: a tensor, or tensors that may be readable only once."""
    import torch

    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _note_own_norm(optimizer: Any) -> None:
    notes.mistake(
        "clipping",
        "get_total_norm measures gradients of which more are to be accumulated "
        f"(backward_passes_per_step={optimizer.backward_passes_per_step}), so each rank has its "
        "own norm. Call it once, after the last backward() of a step.",
    )


def _note_others(tensors: Iterable[Any], owners: Sequence[Any]) -> None:
    averaged = {id(own.grad) for owner in owners for own in owner._requires_update}
    others = sum(id(tensor) not in averaged for tensor in tensors)
    if others:
        notes.mistake(
            "clipping of others",
            f"get_total_norm measures {others} gradient(s) of weights that no DistributedOptimizer "
            "trains, and that are not averaged, so each rank has its own norm. Call "
            "clip_grad_norm_(parameters, max_norm), which averages them, or leave them out.",
        )


def _owners(tensors: Iterable[Any]) -> list[Any]:
    """The optimizers of Horovod's that some parameters or gradients belong to.

    In the order in which they were made, so that all ranks average them in one order.
    """
    given = {id(tensor) for tensor in tensors}
    return [
        optimizer
        for optimizer in sorted(_optimizers, key=lambda each: each._number)
        if any(id(own) in given or id(own.grad) in given for own in optimizer._allreduce_delay)
    ]


def _average_others(parameters: Sequence[Any], owners: Sequence[Any]) -> None:
    """Average the gradients of weights without an optimizer that are clipped with an optimizer's.

    An optimizer gets them later, or none trains them. They count in the norm, by which all ranks
    have to clip alike.
    """
    waiting = [each for each in owners if not each._others_averaged and each.process_set.included()]
    groups = (group for optimizer in list(_optimizers) for group in optimizer.param_groups)
    trained = {id(each) for group in groups for each in group["params"]}
    others = [each for each in parameters if each.requires_grad and id(each) not in trained]
    if not waiting or not others or waiting[0].process_set.size() == 1:
        return
    for optimizer in waiting:
        optimizer._others_averaged = True
    first = waiting[0]
    name = f"clipped with {min(first._parameter_names.values())}"
    average_gradients(others, name, first.process_set, set())


def _average_unless_accumulating(owners: Iterable[Any]) -> list[Any]:
    """Average the gradients of optimizers; returns those that are still to accumulate more."""
    accumulating = []
    for optimizer in owners:
        if optimizer._handles:
            is_accumulating = _is_accumulating(optimizer)
        elif _computed_nothing(optimizer):
            is_accumulating = optimizer.backward_passes_per_step > 1
        else:
            continue
        if is_accumulating:
            accumulating.append(optimizer)
        else:
            _average(optimizer)
    return accumulating


def _computed_nothing(optimizer: Any) -> bool:
    """Whether this rank has left out ``backward`` since the gradients were set to zero.

    Gradients that are not zero were averaged for an earlier step, as where their norm is printed.
    """
    if optimizer._synchronized or not optimizer._should_synchronize:
        return False
    return all(own.grad is None or not own.grad.any() for own in optimizer._requires_update)


def _is_accumulating(optimizer: Any) -> bool:
    """Whether more backward passes are to come before the gradients are averaged."""
    keys = optimizer._handles
    begun = [own for key in keys for own in (key if isinstance(key, tuple) else (key,))]
    return all(optimizer._allreduce_delay[own] > 0 for own in begun)


def mend_scaling(module: Any) -> None:
    """Average gradients before they are unscaled; called with ``torch.amp.grad_scaler``."""

    @instead_of(module.GradScaler, "unscale_")
    def unscale(plain: Any, self: Any, optimizer: Any) -> None:
        if self._enabled:
            _average_scaled(optimizer, self)
        plain(self, optimizer)

    @instead_of(module.GradScaler, "step")
    def step(plain: Any, self: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        if not self._enabled or not hasattr(optimizer, "_allreduce_delay"):
            return plain(self, optimizer, *args, **options)
        _average_scaled(optimizer, self)  # fused optimizers look for infinity without unscale_
        try:
            return plain(self, optimizer, *args, **options)
        finally:  # also if the step was skipped
            optimizer._synchronized = optimizer._averaged_early = False


def _average_scaled(optimizer: Any, scaler: Any) -> None:
    """Average the gradients of an optimizer of Horovod's, unless that is done.

    Also on a rank without any gradient, because the other ranks wait for it.
    """
    if hasattr(optimizer, "_starting_models"):
        raise ValueError(
            "a GradScaler does not work with op=Adasum: this optimizer has made its step in "
            "backward(), with scaled gradients. Use op=Average, or bfloat16 without a scaler."
        )
    if not hasattr(optimizer, "_allreduce_delay"):
        return
    is_averaged = optimizer._synchronized and not optimizer._handles
    scaled_by = getattr(optimizer._compression, "scaled_by", None)
    if scaled_by is not None:
        scaled_by(scaler, is_reduced=is_averaged)
    if optimizer._should_synchronize and not is_averaged:
        _average(optimizer)
