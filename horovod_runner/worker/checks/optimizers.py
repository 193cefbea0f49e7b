"""Makes Horovod's optimizers for PyTorch train what one process trains.

As Horovod makes them, they drop a state that was loaded before they were made, call hooks twice,
move weights that no rank has a gradient for, refuse gradients that are not contiguous, and go on
sending those of weights that have got another optimizer since.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def mend(module: Any) -> None:
    """Change the optimizers of a module, which is ``horovod.torch.optimizer``."""
    kind = module._DistributedOptimizer
    _retire_earlier_ones(kind)
    _leave_out_unused(kind)
    _send_all_layouts(kind)
    for each in (kind, module._DistributedAdasumOptimizer):
        each.step.hooked = True  # the step of the user's class calls them
    _keep_what_was_there(module)


def _keep_what_was_there(module: Any) -> None:
    plain_wrap = module.DistributedOptimizer

    @functools.wraps(plain_wrap)
    def wrap(optimizer: Any, *args: Any, **options: Any) -> Any:
        distributed = plain_wrap(optimizer, *args, **options)
        distributed.state = optimizer.state
        for name in _HOOKS:
            setattr(distributed, name, getattr(optimizer, name))
        distributed._wrapped = optimizer
        return distributed

    module.DistributedOptimizer = wrap
    for kind in (module._DistributedOptimizer, module._DistributedAdasumOptimizer):
        _keep_schedules(kind)


def _keep_schedules(kind: Any) -> None:
    """Let a learning rate schedule that was made for the wrapped optimizer go on."""
    plain_step, plain_load = kind.step, getattr(kind, "load_state_dict", None)

    @functools.wraps(plain_step)
    def step(self: Any, *args: Any, **options: Any) -> Any:
        if hasattr(self, "_wrapped"):
            self._wrapped._opt_called = True  # which the schedule looks at
        return plain_step(self, *args, **options)

    def load_state_dict(self: Any, *args: Any, **options: Any) -> Any:
        groups = self.param_groups
        if plain_load is None:
            super(self.__class__, self).load_state_dict(*args, **options)
        else:
            plain_load(self, *args, **options)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # of which the schedule changes the learning rates
        if hasattr(self, "_wrapped"):
            self._wrapped.state = self.state

    kind.step, kind.load_state_dict = step, load_state_dict


def _retire_earlier_ones(kind: Any) -> None:
    """Let an optimizer send nothing in ``backward`` once its weights have got another one."""
    plain_init, plain_hook = kind.__init__, kind._make_hook
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **options: Any) -> None:
        self._is_retired = False
        plain_init(self, *args, **options)
        for other in known:
            if not other._allreduce_delay.keys().isdisjoint(self._allreduce_delay):
                other._is_retired = True
        known.add(self)

    @functools.wraps(plain_hook)
    def make_hook(self: Any, weight: Any) -> Any:
        hook = plain_hook(self, weight)

        def call(*args: Any) -> None:
            if not self._is_retired:
                hook(*args)

        return call

    kind.__init__, kind._make_hook = init, make_hook


def _leave_out_unused(kind: Any) -> None:
    plain = kind.synchronize

    @functools.wraps(plain)
    def synchronize(self: Any) -> None:
        if not self._requires_update or not self.process_set.included():
            plain(self)
            return
        names = self._parameter_names
        weights = [weight for weight in names if weight in self._requires_update]
        with unused_left_out(weights, names[weights[0]], self.process_set):
            plain(self)

    kind.synchronize = synchronize


@contextmanager
def unused_left_out(weights: Sequence[Any], name: str, process_set: Any) -> Iterator[None]:
    """Take away, at the end, the gradients that no rank had at the beginning.

    In between, zeros are sent for a gradient that a rank lacks. Where all lack it, the optimizer
    would move the weight by its momentum or weight decay: one that is frozen, or is not used. In
    one process it stays.

    Args:
        weights: the same ones on all ranks, in the same order.
        name: for this reduction, the same on all ranks.
        process_set: the ranks that reduce.
    """
    import torch
    from horovod.torch import mpi_ops

    handle = mpi_ops.allreduce_async_(
        # Like most gradients, which Horovod then sends together with it.
        torch.tensor([weight.grad is not None for weight in weights], dtype=torch.float32),
        name=f"has gradient {name}",
        op=mpi_ops.Average,
        process_set=process_set,
    )
    try:
        yield
    finally:  # or the next one would have the name of this one
        shares = mpi_ops.synchronize(handle).tolist()  # of the ranks
    for weight, share in zip(weights, shares, strict=True):
        if not share:
            weight.grad = None


def _send_all_layouts(kind: Any) -> None:
    """Send gradients of every layout: Horovod takes contiguous and dense ones."""
    plain, plain_group = kind._allreduce_grad_async, kind._grouped_allreduce_grad_async
    plain_sparse = kind._sparse_allreduce_grad_async

    @functools.wraps(plain)
    def allreduce(self: Any, parameter: Any) -> Any:
        _make_contiguous(parameter)
        return plain(self, parameter)

    @functools.wraps(plain_group)
    def allreduce_group(self: Any, parameters: Any) -> Any:
        for parameter in parameters:
            if parameter.grad.is_sparse:
                if not self.sparse_as_dense:
                    raise ValueError(
                        f"the gradient of {self._parameter_names[parameter]} is sparse, and groups "
                        "are of dense ones: pass sparse_as_dense=True, or leave groups out"
                    )
                parameter.grad = parameter.grad.to_dense()
            _make_contiguous(parameter)
        return plain_group(self, parameters)

    @functools.wraps(plain_sparse)
    def allreduce_sparse(self: Any, parameter: Any, name: str) -> Any:
        handle, _ = plain_sparse(self, parameter, name)
        return handle, parameter.grad.dtype  # which Compression.fp16 asks for; it is not compressed

    kind._allreduce_grad_async = allreduce
    kind._grouped_allreduce_grad_async = allreduce_group
    kind._sparse_allreduce_grad_async = allreduce_sparse


def _make_contiguous(parameter: Any) -> None:
    gradient = parameter.grad
    if gradient is not None and not gradient.is_sparse and not gradient.is_contiguous():
        parameter.grad = gradient.contiguous()
