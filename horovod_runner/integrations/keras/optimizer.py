"""DistributedOptimizer: makes a Keras optimizer average its gradients over the ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import keras

from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.keras.distributed.batch_norm import SyncBatchNormalization
from horovod_runner.integrations.keras.distributed.horovod_modules import is_keras_3
from horovod_runner.integrations.keras.distributed.mixin import Distributed, make_distributed
from horovod_runner.integrations.keras.reduction import Reduction, groups_of
from horovod_runner.worker.imports.patches import instead_of


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras 3 optimizer reduce its gradients over the ranks.

    With TF_USE_LEGACY_KERAS=1 an optimizer of Keras 2 is passed on to Horovod's own function. The
    arguments are those of ``horovod.tensorflow.keras.DistributedOptimizer``.

    Args:
        optimizer: an optimizer, or its name. A LossScaleOptimizer may wrap it, now or later in
            ``model.compile``: all ranks skip the same steps.
        name: the name of the reductions in a timeline and in a HangError, the same on all ranks;
            None numbers the optimizers.
        device_dense: TensorFlow's device for the reduction of dense gradients.
        device_sparse: TensorFlow's device for the reduction of sparse gradients.
        compression: ``Compression.none``, ``fp16`` or ``bf16``, or a class with ``compress`` and
            ``decompress`` like Horovod's. None is ``none``.
        sparse_as_dense: whether to make sparse gradients dense (those of an embedding on
            TensorFlow).
        gradient_predivide_factor: divides the gradients before the sum; the division by the number
            of ranks is completed after it.
        op: ``Average`` or ``Sum``; None is ``Average``.
        backward_passes_per_step: the number of batches to accumulate per update; sets the
            optimizer's ``gradient_accumulation_steps``.
        average_aggregated_gradients: whether to average accumulated gradients. False sums them, as
            in Horovod.
        num_groups: the old name of ``groups``.
        groups: the number of groups of dense gradients, each reduced in one operation; or a list of
            lists of variables, where each variable that is in no list is a group of its own. None
            reduces each gradient as soon as it is ready.
        process_set: the ranks that reduce, as a ``ProcessSet``; other ranks keep their gradients.
            None for all ranks.
        scale_local_gradients: whether to divide the gradients of local variables by the number of
            ranks, so that they have the size that they would have in an average.

    Returns:
        The given optimizer, with its state. Its method ``register_local_var(variable)`` keeps the
        gradients of a variable on their rank, and ``compute_gradients(loss, variables, tape)``
        returns reduced gradients.

    Raises:
        TypeError: ``optimizer`` is not a Keras 3 optimizer, or an argument has another type.
        ValueError: the value of an argument is not supported.
    """
    if num_groups:
        warnings.warn("num_groups was renamed to groups", DeprecationWarning, stacklevel=2)
    if (horovod_for_keras_2 := _horovod_for_keras_2(optimizer)) is not None:
        given = {"compression": compression, "op": op, "process_set": process_set}
        return horovod_for_keras_2.DistributedOptimizer(
            optimizer,
            name,
            device_dense,
            device_sparse,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups if groups is not None else num_groups or None,
            scale_local_gradients=scale_local_gradients,
            **{argument: value for argument, value in given.items() if value is not None},
        )
    optimizer = _keras_3_optimizer(optimizer)
    inner = _inner(optimizer)
    if isinstance(inner, Distributed):
        raise ValueError(
            f"this {type(inner).__name__} is distributed already: call DistributedOptimizer only "
            "once (load_model calls it, too)"
        )
    hvd = collectives().hvd
    is_global = getattr(process_set, "process_set_id", None) == 0
    reduction = Reduction(
        op=hvd.Average if op is None else op,
        compression=hvd.Compression.none if compression is None else compression,
        predivide=float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        groups=groups_of(num_groups if groups is None else groups, inner._var_key),
        device_dense=device_dense,
        device_sparse=device_sparse,
        process_set=None if is_global else process_set,
    )
    reduction.check(hvd)
    _accumulate(inner, backward_passes_per_step)
    settings = {
        "_reduction": reduction,
        "_sums_passes": backward_passes_per_step > 1 and not average_aggregated_gradients,
        "_name_from_user": name,
        "_local": {},
        "_scales_local": scale_local_gradients,
        "_slots": [],
    }
    make_distributed(inner, settings)
    _synchronize_loss_scaling()
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802, D417 - Horovod's name; its arguments are above
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Make a Keras 3 optimizer reduce its gradients, except those of local layers.

    A local layer belongs to its rank, such as an embedding of the rank's own rows: its gradients
    are not averaged. Name its variables in ``BroadcastGlobalVariablesCallback(0,
    local_variables=...)`` too, if they are to begin differently on each rank.

    Args:
        optimizer: an optimizer, or its name.
        name: this and all arguments without a line here are as for :func:`DistributedOptimizer`.
        local_layers: a layer, or a list of layers. They must have their weights already. None is
            the same as :func:`DistributedOptimizer`.

    Raises:
        TypeError: ``local_layers`` has something that is not a layer.
        ValueError: a layer has no weights yet; or as for :func:`DistributedOptimizer`.
    """
    layers = [] if local_layers is None else local_layers
    layers = layers if isinstance(layers, (list, tuple, set)) else [layers]
    is_keras_2 = _horovod_for_keras_2(optimizer) is not None
    layer_class = sys.modules["tf_keras"].layers.Layer if is_keras_2 else keras.layers.Layer
    for layer in layers:
        if not isinstance(layer, layer_class):
            version = 2 if is_keras_2 else 3
            raise TypeError(f"local_layers must be layers of Keras {version}, not {layer!r}")
        if not layer.built:
            raise ValueError(
                f"the local layer {layer.name!r} has no weights yet, so its gradients would be "
                "averaged: call model.build(input_shape), or begin the model with keras.Input, "
                "before PartialDistributedOptimizer"
            )
    optimizer = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **options,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            _inner(optimizer).register_local_var(variable)
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a Keras model, and make its optimizer distributed; the optimizer's state is restored.

    The file is a plain Keras file: ``model.save`` writes no trace of Horovod.

    Args:
        filepath: the path of a ``.keras`` or ``.h5`` file.
        custom_optimizers: custom optimizer classes.
        custom_objects: other custom classes and functions by name.
        compression: as for :func:`DistributedOptimizer`.
        legacy_opts: ignored on Keras 3; for compatibility.
    """
    objects = {cls.__name__: cls for cls in (SyncBatchNormalization, *(custom_optimizers or ()))}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _horovod_for_keras_2(optimizer: Any) -> Any:
    """``horovod.tensorflow.keras`` for an optimizer of Keras 2, where that is ``tf.keras``."""
    if type(optimizer).__module__.partition(".")[0] != "tf_keras":
        return None
    if is_keras_3("horovod.tensorflow.keras"):  # TF_USE_LEGACY_KERAS is not set
        return None
    return import_module("horovod.tensorflow.keras")


def _keras_3_optimizer(optimizer: Any) -> Any:
    """Return an optimizer for an object or a name."""
    module = type(optimizer).__module__.partition(".")[0]
    if module in ("tf_keras", "torch"):
        other = "horovod.tensorflow.keras, with TF_USE_LEGACY_KERAS=1 set,"
        raise TypeError(
            f"{type(optimizer).__qualname__} is an optimizer of {module}, not of Keras 3: use the "
            f"DistributedOptimizer of {'horovod.torch' if module == 'torch' else other} instead"
        )
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(f"{name} is a class: pass an optimizer, {name}(...)")
    return keras.optimizers.get(optimizer)


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside of those that scale the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _accumulate(optimizer: Any, passes: int) -> None:
    """Make an optimizer accumulate the gradients of ``passes`` batches."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes!r}")
    if passes == 1:
        return
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes}, but the optimizer has "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: set only one"
        )
    if optimizer.built:
        raise ValueError(
            f"backward_passes_per_step={passes} needs extra variables, but the optimizer is built "
            "already. Call DistributedOptimizer before model.fit and before its state is loaded, "
            f"or create the optimizer with gradient_accumulation_steps={passes}"
        )
    optimizer.gradient_accumulation_steps = passes


def _synchronize_loss_scaling() -> None:
    """Make all ranks skip the same steps: otherwise one rank would wait where others skip.

    This patches Keras's class, because ``model.compile`` may wrap an optimizer later.
    """
    scaled = keras.optimizers.LossScaleOptimizer
    if hasattr(scaled.check_finite, "__wrapped__"):
        return

    @instead_of(scaled, "check_finite")
    def check_finite(plain: Any, self: Any, grads: Any) -> Any:
        finite = plain(self, grads)
        inner = self.inner_optimizer
        if isinstance(inner, Distributed):
            backend, how = collectives(), inner._reduction
            if how.size(backend.hvd) > 1:
                return backend.all_finite(finite, inner._name_of_reduction(), how)
        return finite
