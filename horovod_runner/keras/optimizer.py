"""DistributedOptimizer: a Keras optimizer that averages gradients over the ranks.

Keras 3 calls ``_clip_gradients`` once for each update of the weights: after gradients have been
accumulated, before they are clipped and weights decay. There they are reduced. The optimizer stays
what it was, its state with it, and is saved as what it was.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from horovod_runner.context import check_sync
from horovod_runner.keras.collectives import collectives
from horovod_runner.keras.reduction import BFloat16, Reduction

_numbers = itertools.count(1)


class Variables(list[Any]):
    """An optimizer's variables, which older code calls: ``optimizer.variables()``."""

    def __call__(self) -> Variables:
        return self


class Distributed:
    """Put before an optimizer's own class."""

    _reduction: Reduction
    _sums_passes: bool
    _given_name: str | None
    _own_name: str | None = None
    _unreduced = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # What Keras writes to a file: the optimizer's own class, which loads without this one.
        return type(self).__mro__[2]

    @property
    def variables(self) -> Variables:
        return Variables(super().variables)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        gradients = list(grads)
        self._unreduced += 1
        super().apply(gradients, trainable_variables)  # type: ignore[misc]
        if self._unreduced < (self.gradient_accumulation_steps or 1):  # type: ignore[attr-defined]
            return
        self._unreduced = 0
        if gradients and collectives().hvd.size() > 1:
            raise RuntimeError(
                f"Keras {keras.__version__} updated the weights without averaging the gradients "
                f"over the ranks ({type(self).__name__} did not call _clip_gradients): this "
                "horovod_runner does not know this Keras. Use another version of either."
            )

    def finalize_variable_values(self, var_list: Any) -> None:
        """The end of ``model.fit``, with or without callbacks."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        check_sync(var_list)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        self._unreduced = 0
        gradients = list(grads)
        own = collectives()
        if self._sums_passes:
            gradients = own.scale(gradients, float(self.gradient_accumulation_steps))  # type: ignore[attr-defined]
        if own.hvd.size() > 1:
            gradients = own.reduce_gradients(gradients, self._name_of_reduction(), self._reduction)
        return super()._clip_gradients(gradients)  # type: ignore[misc]

    def _name_of_reduction(self) -> str:
        # Numbered in the order of their first use, which is the same on all ranks.
        if self._own_name is None:
            self._own_name = self._given_name or f"DistributedOptimizer.{next(_numbers)}"
        return self._own_name


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
    groups: int | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras 3 optimizer reduce its gradients over all ranks.

    The arguments are those of ``horovod.tensorflow.keras.DistributedOptimizer``. It is the
    optimizer that was given which is returned, with the state that it has.

    Args:
        optimizer: an optimizer, or its name; a LossScaleOptimizer may be around it, or be put there
            by ``model.compile`` later: all ranks skip the same steps.
        name: of the reductions, in a timeline and in a HangError. It must be the same on all ranks.
        device_dense: TensorFlow's device to reduce dense gradients on.
        device_sparse: and sparse ones.
        compression: ``Compression.none``, ``fp16``, ``bf16``; or what has Horovod's ``compress``
            and ``decompress``.
        sparse_as_dense: whether sparse gradients (an embedding's, on TensorFlow) are made dense.
        gradient_predivide_factor: splits the division by the number of ranks: by this before the
            sum, by the rest after it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: how many batches to accumulate before a reduction and an update;
            it sets the optimizer's ``gradient_accumulation_steps``.
        average_aggregated_gradients: whether these are averaged; as in Horovod they are added up
            without.
        groups: how many groups of dense gradients to reduce, each as one; None reduces each as soon
            as it is there.
        num_groups: its older name.
        process_set: Horovod's global one; others are refused.
        scale_local_gradients: taken and without a meaning: all gradients are reduced.

    Raises:
        TypeError: that is no Keras 3 optimizer.
        ValueError: an argument has a value that means nothing.
    """
    own = collectives()
    optimizer = _checked(optimizer)
    if process_set is not None and getattr(process_set, "process_set_id", None) != 0:
        raise ValueError("process_set must be the global one: gradients are reduced over all ranks")
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
    if isinstance(inner, Distributed):
        raise ValueError(
            f"this {type(inner).__name__} is distributed already: call DistributedOptimizer once "
            "(load_model has done so)"
        )
    op = own.hvd.Average if op is None else op
    if op not in (own.hvd.Average, own.hvd.Sum):
        raise ValueError("op must be Average or Sum: Horovod's Adasum needs MPI, and others no sum")
    if gradient_predivide_factor != 1.0 and op != own.hvd.Average:
        raise ValueError("gradient_predivide_factor splits an average: it needs op=Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(
            f"gradient_predivide_factor must be above 0, not {gradient_predivide_factor}"
        )
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
    count = num_groups if groups is None else groups
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(
            f"groups must be the number of groups, not {groups!r}: lists of variables are not "
            "supported on Keras 3"
        )
    _accumulate(inner, backward_passes_per_step)
    reduction = Reduction(
        op=op,
        compression=own.hvd.Compression.none if compression is None else compression,
        predivide=float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        groups=count,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    _check_compression(reduction)
    plain = type(inner)
    members = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "_reduction": reduction,
        "_sums_passes": backward_passes_per_step > 1 and not average_aggregated_gradients,
        "_given_name": name,
    }
    object.__setattr__(inner, "__class__", type(plain.__name__, (Distributed, plain), members))
    _mend_loss_scaling()
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a Keras model, its optimizer distributed and with the state that was saved.

    The model needs no trace of Horovod: ``model.save`` writes a plain one.

    Args:
        filepath: of a ``.keras`` or ``.h5`` file.
        custom_optimizers: classes of optimizers of your own.
        custom_objects: other classes and functions by name.
        compression: as for :func:`DistributedOptimizer`.
        legacy_opts: taken and without a meaning on Keras 3.
    """
    objects = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _checked(optimizer: Any) -> Any:
    if type(optimizer).__module__.partition(".")[0] in ("tf_keras", "torch"):
        module = type(optimizer).__module__.partition(".")[0]
        other = "horovod.tensorflow.keras, with TF_USE_LEGACY_KERAS=1 set,"
        raise TypeError(
            f"{type(optimizer).__qualname__} is an optimizer of {module}, not of Keras 3: for it "
            f"use the DistributedOptimizer of {'horovod.torch' if module == 'torch' else other} "
            "instead"
        )
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(f"{name} is a class; give an optimizer, {name}(...)")
    return keras.optimizers.get(optimizer)


def _accumulate(optimizer: Any, passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be a number from 1 on, not {passes!r}")
    if passes == 1:
        return
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes}, and the optimizer has "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: set one of them"
        )
    if optimizer.built:
        raise ValueError(
            f"backward_passes_per_step={passes} needs room for the gradients in an optimizer that "
            "is built already: call DistributedOptimizer before model.fit and before its state is "
            f"loaded, or create it with gradient_accumulation_steps={passes}"
        )
    optimizer.gradient_accumulation_steps = passes


def _check_compression(reduction: Reduction) -> None:
    compression = reduction.compression
    if compression is BFloat16:
        if reduction.predivide != 1.0 or reduction.groups:
            raise ValueError(
                "Compression.bf16 adds up in float32, in one piece: it goes with neither "
                "gradient_predivide_factor nor groups"
            )
    elif not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(f"compression must be Compression.none, fp16 or bf16, not {compression!r}")


def _mend_loss_scaling() -> None:
    """Have all ranks find the same gradients finite, or one would wait where others skip the step.

    In Keras's class itself: ``model.compile`` puts a LossScaleOptimizer around an optimizer.
    """
    plain = keras.optimizers.LossScaleOptimizer.check_finite
    if hasattr(plain, "mends"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = plain(self, grads)
        inner = self.inner_optimizer
        if isinstance(inner, Distributed) and collectives().hvd.size() > 1:
            return collectives().all_finite(finite, inner._name_of_reduction())
        return finite

    check_finite.mends = plain  # type: ignore[attr-defined]
    keras.optimizers.LossScaleOptimizer.check_finite = check_finite
