"""Makes functions of horovod.tensorflow work with Keras 3: variables, optimizers, groups.

A variable of Keras 3 holds a ``tf.Variable``. It has no ``ref()``, by which Horovod knows
variables.

This module does not import horovod.tensorflow, which is being imported when it is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from horovod_runner.integrations.keras.reduction import Reduction, groups_of
from horovod_runner.integrations.keras.values import is_seed
from horovod_runner.worker.checks.models import check_same_model
from horovod_runner.worker.imports.patches import instead_of

# The arguments of horovod.tensorflow.DistributedOptimizer after use_locking; Keras's has others.
_ORDER = (
    *("device_dense", "device_sparse", "compression", "sparse_as_dense"),
    *("backward_passes_per_step", "op", "gradient_predivide_factor"),
    *("average_aggregated_gradients", "num_groups", "groups", "process_set"),
    "scale_local_gradients",
)


def patch(hvd: Any) -> None:
    """Patch the module horovod.tensorflow."""
    _patch_tape(hvd._DistributedGradientTape)
    _patch_broadcast(hvd)
    for name in ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"):
        # With a compression these look at the type of a tensor.
        setattr(hvd, name, _of_tensors(getattr(hvd, name)))
    hvd._make_allreduce_grads_fn = _with_our_reductions(hvd)
    hvd.DistributedOptimizer = _for_keras_optimizers(hvd)


def _patch_broadcast(hvd: Any) -> None:
    original = hvd.broadcast_variables

    def broadcast_variables(
        variables: Any,
        root_rank: int,
        process_set: Any = hvd.global_process_set,
        inplace: bool = False,
    ) -> Any:
        # Keras 3 counts the states of random generators among a model's variables.
        weights = [_unwrapped(variable) for variable in variables if not is_seed(variable)]
        if inplace or not tf.executing_eagerly():
            return original(weights, root_rank, process_set, inplace)
        if process_set.process_set_id == 0:
            check_same_model(((v.name, v.shape) for v in weights), same_names=False)
        from horovod_runner.integrations.keras import tensorflow_collectives as collectives

        # By their numbers: where a layer makes its weights depends on which rank uses it first,
        # and with it their names.
        collectives.broadcast_variables(weights, root_rank, process_set)
        return None

    hvd.broadcast_variables = hvd.elastic.broadcast_variables = broadcast_variables


def _patch_tape(tape: Any) -> None:
    """Make the methods of a DistributedGradientTape accept Keras 3's variables."""

    @instead_of(tape, "register_local_source")
    def register_local_source(plain: Any, self: Any, source: Any) -> None:
        plain(self, _unwrapped(source))

    @instead_of(tape, "gradient")
    def gradient(plain: Any, self: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
        return plain(self, target, [_unwrapped(source) for source in sources], *args, **more)

    def get_local_and_global_gradients(
        self: Any, target: Any, sources: Sequence[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        pairs = list(zip(sources, self.gradient(target, sources, *args, **kwargs), strict=True))
        is_local = [_unwrapped(source).ref() in self._local_sources for source in sources]
        return (
            [pair for pair, local in zip(pairs, is_local, strict=True) if local],
            [pair for pair, local in zip(pairs, is_local, strict=True) if not local],
        )

    tape.get_local_and_global_gradients = get_local_and_global_gradients


def _with_our_reductions(hvd: Any) -> Callable[..., Any]:
    """Reduce gradients under fixed names, and send zeros for those that this rank lacks.

    Horovod leaves out what a rank lacks, and adds up gradients of different steps. It finds the
    variables of listed groups by name, and loses all gradients but one of those that have the same
    name.
    """
    original = hvd._make_allreduce_grads_fn

    def make(
        name: str,
        device_dense: str,
        device_sparse: str,
        compression: Any,
        sparse_as_dense: bool,
        op: Any,
        gradient_predivide_factor: float,
        groups: Any,
        process_set: Any,
    ) -> Any:
        if op == hvd.Adasum or not tf.compat.v1.executing_eagerly_outside_functions():
            return original(
                *(name, device_dense, device_sparse, compression, sparse_as_dense, op),
                *(gradient_predivide_factor, groups, process_set),
            )
        from horovod_runner.integrations.keras import tensorflow_collectives as collectives

        how = Reduction(
            op=op,
            compression=compression,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            groups=groups_of(groups, _key),
            device_dense=device_dense,
            device_sparse=device_sparse,
            process_set=None if process_set.process_set_id == 0 else process_set,
        )
        how.check(hvd)

        def reduce(grads: Any, variables: Any, use_generic_names: bool = False) -> list[Any]:
            if how.size(hvd) == 1 or not variables:
                return list(grads)
            graph = collectives.graph()
            # In a graph two tapes may reduce at the same time.
            unique = name if graph == "eager" else graph.unique_name(name)
            partition = how.partition([_key(variable) for variable in variables])
            filled, ranks, alike = collectives.complete(grads, variables, unique, how)
            reduced = collectives.reduce_gradients(filled, unique, how, partition, alike)
            if graph == "eager":  # where it is known that no rank has one
                counts = ranks().numpy()
                reduced = [g if count else None for g, count in zip(reduced, counts, strict=True)]
            return reduced

        return reduce

    return make


def _for_keras_optimizers(hvd: Any) -> Callable[..., Any]:
    """Make ``DistributedOptimizer`` pass all its arguments on; Horovod forgets op and groups."""
    original = hvd.DistributedOptimizer

    def DistributedOptimizer(  # noqa: N802 - Horovod's name
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            return original(optimizer, name, use_locking, *args, **kwargs)
        from horovod_runner.integrations.keras import optimizer as keras_optimizer

        arguments = dict(zip(_ORDER, args, strict=False))
        return keras_optimizer.DistributedOptimizer(optimizer, name, **arguments, **kwargs)

    DistributedOptimizer.__doc__ = original.__doc__
    return DistributedOptimizer


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function accept Keras 3's variables, also in lists."""

    def unwrapped(value: Any) -> Any:
        inside = isinstance(value, (list, tuple))
        return [_unwrapped(item) for item in value] if inside else _unwrapped(value)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: unwrapped(value) for name, value in kwargs.items()}
        return function(*map(unwrapped, args), **named)

    return call


def _key(variable: Any) -> Any:
    return _unwrapped(variable).ref()


def _unwrapped(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
