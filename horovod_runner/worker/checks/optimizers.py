"""Makes Horovod's optimizers for PyTorch train what one process trains.

As Horovod makes them, they drop a state that was loaded before they were made, call hooks twice,
move weights that no rank has a gradient for, refuse gradients that are not contiguous, and go on
sending those of weights that have got another optimizer since. They leave weights that are added or
unfrozen later to each rank, and mix up two networks whose weights have the same names.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from horovod_runner.worker.imports.patches import instead_of

_names: Counter[str] = Counter()  # of weights: how many optimizers have used each
_earlier_ones: weakref.WeakSet[Any] = weakref.WeakSet()

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
    _take_new_weights(kind)
    _take_more_passes(kind)
    _average_what_one_process_has(kind)
    _send_all_layouts(kind)
    for each in (kind, module._DistributedAdasumOptimizer):
        each.step.hooked = True  # the step of the user's class calls them
        _keep_schedules(each)
    _keep_what_was_there(module)


def _keep_what_was_there(module: Any) -> None:
    @instead_of(module, "DistributedOptimizer")
    def wrap(plain: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        distributed = plain(optimizer, *args, **options)
        distributed.state = optimizer.state
        distributed.defaults = optimizer.defaults  # of groups that are added later
        for name in _HOOKS:
            setattr(distributed, name, getattr(optimizer, name))
        distributed._wrapped = optimizer
        return distributed


def _keep_schedules(kind: Any) -> None:
    """Let a learning rate schedule that was made for the wrapped optimizer go on."""

    @instead_of(kind, "step")
    def step(plain: Any, self: Any, *args: Any, **options: Any) -> Any:
        if hasattr(self, "_wrapped"):
            self._wrapped._opt_called = True  # which the schedule looks at
        return plain(self, *args, **options)

    @instead_of(kind, "load_state_dict")
    def load_state_dict(plain: Any, self: Any, *args: Any, **options: Any) -> Any:
        groups = self.param_groups
        plain(self, *args, **options)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # of which the schedule changes the learning rates
        if hasattr(self, "_wrapped"):
            self._wrapped.state = self.state


def _take_new_weights(kind: Any) -> None:
    """Take weights from earlier optimizers, and those that are added later."""

    @instead_of(kind, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        self._is_retired = self._is_made = False
        plain(self, *args, **options)
        for other in _earlier_ones:  # they send nothing in backward from now on
            if not other._allreduce_delay.keys().isdisjoint(self._allreduce_delay):
                other._is_retired = True
        _earlier_ones.add(self)
        self._own_names = dict(self._parameter_names)
        self._dense = set()
        # Two networks may be in flight at a time, and their weights have the same names.
        earlier = max((_names[name] for name in self._parameter_names.values()), default=0)
        _names.update(self._parameter_names.values())
        if earlier:
            for weight, name in self._parameter_names.items():
                self._parameter_names[weight] = f"{name} of optimizer {earlier + 1}"
        self._is_made = True

    def add_param_group(self: Any, group: Any) -> None:
        super(self.__class__, self).add_param_group(group)
        if not getattr(self, "_is_made", False):
            return
        number = len(self.param_groups) - 1
        for place, weight in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names[weight] = f"allreduce.noname.{number}.{place}"
            self._allreduce_delay[weight] = self.backward_passes_per_step

    kind.add_param_group = add_param_group


def _take_more_passes(kind: Any) -> None:
    """Accept a backward pass more than ``backward_passes_per_step``.

    It happens where some passes are left over at the end of an epoch, and where the loss of one
    network also gives gradients to another one. So accumulated gradients are sent in ``step``, and
    not during the last pass, for it may not be the last one.
    """

    @instead_of(kind, "_make_hook")
    def make_hook(plain: Any, self: Any, weight: Any) -> Any:
        hook = plain(self, weight)

        def call(*args: Any) -> None:
            if self._is_retired:
                return
            if self._allreduce_delay[weight] > 0 and self.backward_passes_per_step == 1:
                hook(*args)
            elif self._allreduce_delay[weight] > 0:
                self._allreduce_delay[weight] -= 1
                self._handles[weight] = (None, None)
            elif self._handles.get(weight, ("sent in a group", None))[0] is not None:
                raise ValueError(
                    "a second backward pass came before step(), and the gradient of "
                    f"{self._parameter_names[weight]} is already being averaged. Call step() or "
                    "the zero_grad() of this optimizer before it, or pass "
                    "backward_passes_per_step=... to DistributedOptimizer, with the number of "
                    "passes of a step."
                )

        return call


def forget_gradients(optimizer: Any) -> None:
    """Drop gradients that no step has used, as in a network that another one's loss has reached."""
    if any(handle is not None for handle, _ in optimizer._handles.values()):
        optimizer.synchronize()  # the ranks average them already
    optimizer._handles.clear()
    optimizer._unsent_bytes = 0
    for weight in optimizer._allreduce_delay:
        optimizer._allreduce_delay[weight] = optimizer.backward_passes_per_step
    for group in optimizer._group_counts:
        optimizer._group_counts[group] = 0


def _average_what_one_process_has(kind: Any) -> None:
    """Average the gradients of all weights that any rank has one for, and no others."""

    @instead_of(kind, "synchronize")
    def synchronize(plain: Any, self: Any) -> None:
        if not self.process_set.included():
            plain(self)
            return
        if self.process_set.size() > 1:
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.requires_grad and weight not in self._requires_update:
                        _watch(self, weight)  # it was added or unfrozen later
        names = self._parameter_names
        weights = [weight for weight in names if weight in self._requires_update]
        if not weights:
            plain(self)
            return
        with unused_left_out(weights, names[weights[0]], self.process_set, self._dense) as fill:
            fill()
            _send_whole_groups(self)
            plain(self)


def _watch(optimizer: Any, weight: Any) -> None:
    optimizer._requires_update.add(weight)
    if optimizer._groups is not None:
        optimizer._p_to_group[weight] = (weight,)
        optimizer._group_counts[(weight,)] = 0
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(optimizer._make_hook(weight))
    optimizer._grad_accs.append(accumulator)


def _send_whole_groups(optimizer: Any) -> None:
    """Send each group as a group, on ranks that lack a gradient of it, too."""
    for group in optimizer._group_counts:
        if group not in optimizer._handles:
            for weight in group:
                optimizer._handles.pop(weight, None)
                if weight.grad is None:
                    weight.grad = weight.detach().new_zeros(weight.shape)
            optimizer._handles[group] = optimizer._grouped_allreduce_grad_async(group)
            optimizer._group_counts[group] = 0


@contextmanager
def unused_left_out(
    weights: Sequence[Any], name: str, process_set: Any, dense: set[Any]
) -> Iterator[Callable[[], None]]:
    """Take away, at the end, the gradients that no rank had at the beginning.

    In between, zeros are sent for a gradient that a rank lacks. Where all lack it, the optimizer
    would move the weight by its momentum or weight decay: one that is frozen, or is not used. In
    one process it stays.

    Args:
        weights: the same ones on all ranks, in the same order.
        name: for this reduction, the same on all ranks.
        process_set: the ranks that reduce.
        dense: the weights that are known to have dense gradients; others are added.

    Yields:
        A function that sets the gradients that this rank lacks to zeros: sparse ones, as those of
        an embedding, where the other ranks have sparse ones.
    """
    import torch
    from horovod.torch import mpi_ops

    gradients = [weight.grad for weight in weights]
    there = [gradient is not None for gradient in gradients]
    sparse = [g.sparse_dim() if g is not None and g.is_sparse else 0 for g in gradients]
    handle = mpi_ops.allreduce_async_(
        # Like most gradients, which Horovod then sends together with it.
        torch.tensor([there, sparse], dtype=torch.float32),
        name=f"has gradient {name}",
        op=mpi_ops.Average,
        process_set=process_set,
    )

    @functools.cache
    def of_all_ranks() -> tuple[list[float], list[float]]:
        shares, dimensions = mpi_ops.synchronize(handle).tolist()
        return shares, dimensions

    def fill() -> None:
        if any(weight.grad is None and weight not in dense for weight in weights):
            for weight, share, dimension in zip(weights, *of_all_ranks(), strict=True):
                if weight.grad is None and dimension:
                    weight.grad = _sparse_zeros(weight, round(dimension / share))
                elif share and not dimension:
                    dense.add(weight)
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    try:
        yield fill
    finally:  # or the next one would have the name of this one
        shares, _ = of_all_ranks()
    for weight, share in zip(weights, shares, strict=True):
        if not share:
            weight.grad = None


def average_gradients(weights: Sequence[Any], name: str, process_set: Any, dense: set[Any]) -> None:
    """Average the gradients of weights over the ranks; see :func:`unused_left_out`."""
    from horovod.torch import mpi_ops

    with unused_left_out(weights, name, process_set, dense) as fill:
        fill()
        handles = []
        for number, weight in enumerate(weights):
            _make_contiguous(weight)
            gradient = weight.grad
            sparse = gradient.is_sparse
            reduce = mpi_ops.sparse_allreduce_async if sparse else mpi_ops.allreduce_async_
            options = {"op": mpi_ops.Average, "process_set": process_set}
            handles.append(reduce(gradient, name=f"{name}.{number}", **options))
        for weight, handle in zip(weights, handles, strict=True):
            if weight.grad.is_sparse:
                weight.grad = handle()
            else:
                mpi_ops.synchronize(handle)


def _sparse_zeros(weight: Any, dimension: int) -> Any:
    """A gradient of zeros without a row, of which ``dimension`` dimensions are sparse."""
    import torch

    indices = torch.zeros((dimension, 0), dtype=torch.int64, device=weight.device)
    values = weight.detach().new_zeros((0, *weight.shape[dimension:]))
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)


def _send_all_layouts(kind: Any) -> None:
    """Send gradients of every layout: Horovod takes contiguous and dense ones."""

    @instead_of(kind, "_allreduce_grad_async")
    def allreduce(plain: Any, self: Any, parameter: Any) -> Any:
        _make_contiguous(parameter)
        return plain(self, parameter)

    @instead_of(kind, "_grouped_allreduce_grad_async")
    def allreduce_group(plain: Any, self: Any, parameters: Any) -> Any:
        for parameter in parameters:
            if parameter.grad.is_sparse:
                if not self.sparse_as_dense:
                    raise ValueError(
                        f"the gradient of {self._parameter_names[parameter]} is sparse, and groups "
                        "are of dense ones: pass sparse_as_dense=True, or leave groups out"
                    )
                parameter.grad = parameter.grad.to_dense()
            _make_contiguous(parameter)
        return plain(self, parameters)

    @instead_of(kind, "_sparse_allreduce_grad_async")
    def allreduce_sparse(plain: Any, self: Any, parameter: Any, name: str) -> Any:
        handle, _ = plain(self, parameter, name)
        return handle, parameter.grad.dtype  # which Compression.fp16 asks for; it is not compressed


def _make_contiguous(parameter: Any) -> None:
    gradient = parameter.grad
    if gradient is not None and not gradient.is_sparse and not gradient.is_contiguous():
        parameter.grad = gradient.contiguous()
