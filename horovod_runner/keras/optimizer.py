"""DistributedOptimizer: makes a Keras optimizer average its gradients over the ranks.

Keras 3 calls ``_clip_gradients`` once per update of the weights: after gradients were accumulated,
and before they are clipped and weights decay. Gradients are reduced there. The optimizer object and
its state stay the same, and Keras saves it as the plain optimizer.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from horovod_runner.keras.collectives import collectives
from horovod_runner.keras.reduction import BFloat16, Reduction
from horovod_runner.worker.api import check_weights

_numbers = itertools.count(1)


class Variables(list[Any]):
    """The variables of an optimizer; older code calls the attribute: ``optimizer.variables()``."""

    def __call__(self) -> Variables:
        return self


class Distributed:
    """A mixin in front of the class of a Keras optimizer."""

    _reduction: Reduction
    _sums_passes: bool
    _name_from_user: str | None
    _reduction_name: str | None = None
    _unreduced = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras writes this class to a file: the plain optimizer's, which loads without this module.
        return type(self).__mro__[2]

    @property
    def variables(self) -> Variables:
        return Variables(super().variables)  # type: ignore[misc]

    @property
    def lr(self) -> Any:
        """Keras 2's name; without it Keras 3 would accept ``optimizer.lr = x`` and ignore it."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

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
                f"over the ranks ({type(self).__name__} did not call _clip_gradients). This "
                "version of horovod_runner does not support this version of Keras: change one of "
                "them."
            )

    def finalize_variable_values(self, var_list: Any) -> None:
        """Compare the ranks' weights at the end of ``model.fit``, also without callbacks."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        check_weights(var_list)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        self._unreduced = 0
        gradients = list(grads)
        backend = collectives()
        if self._sums_passes:
            passes = float(self.gradient_accumulation_steps)  # type: ignore[attr-defined]
            gradients = backend.scale(gradients, passes)
        if backend.hvd.size() > 1:
            name = self._name_of_reduction()
            gradients = backend.reduce_gradients(gradients, name, self._reduction)
        return super()._clip_gradients(gradients)  # type: ignore[misc]

    def _name_of_reduction(self) -> str:
        # Numbered in the order of first use, which is the same on all ranks.
        if self._reduction_name is None:
            name = self._name_from_user
            self._reduction_name = name or f"DistributedOptimizer.{next(_numbers)}"
        return self._reduction_name


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

    The arguments are those of ``horovod.tensorflow.keras.DistributedOptimizer``.

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
        groups: the number of groups of dense gradients, each reduced in one operation. None reduces
            each gradient as soon as it is ready.
        process_set: None or Horovod's global process set.
        scale_local_gradients: ignored; for compatibility.

    Returns:
        The given optimizer, with its state.

    Raises:
        TypeError: ``optimizer`` is not a Keras 3 optimizer.
        ValueError: the value of an argument is not supported.
    """
    if num_groups:
        warnings.warn("num_groups was renamed to groups", DeprecationWarning, stacklevel=2)
    optimizer = _keras_3_optimizer(optimizer)
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):
        inner = inner.inner_optimizer
    if isinstance(inner, Distributed):
        raise ValueError(
            f"this {type(inner).__name__} is distributed already: call DistributedOptimizer only "
            "once (load_model calls it, too)"
        )
    if process_set is not None and getattr(process_set, "process_set_id", None) != 0:
        raise ValueError("process_set must be the global one: gradients are reduced over all ranks")
    hvd = collectives().hvd
    reduction = Reduction(
        op=hvd.Average if op is None else op,
        compression=hvd.Compression.none if compression is None else compression,
        predivide=float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        groups=num_groups if groups is None else groups,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    _check(reduction, hvd)
    _accumulate(inner, backward_passes_per_step)
    sums_passes = backward_passes_per_step > 1 and not average_aggregated_gradients
    _make_distributed(inner, reduction, name, sums_passes)
    _synchronize_loss_scaling()
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
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _keras_3_optimizer(optimizer: Any) -> Any:
    """Return an optimizer for an object or a name.

    Raises:
        TypeError: it is an optimizer of another library, or a class.
    """
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


def _check(reduction: Reduction, hvd: Any) -> None:
    """Check the settings of a reduction.

    Raises:
        TypeError: the compression is not one.
        ValueError: a setting is not supported.
    """
    op, factor, groups = reduction.op, reduction.predivide, reduction.groups
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(
            "op must be Average or Sum: Adasum requires MPI, and the other operations are not sums"
        )
    if factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor splits an average: it requires op=Average")
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be above 0, not {factor}")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
        raise ValueError(
            f"groups must be the number of groups, not {groups!r}: lists of variables are not "
            "supported on Keras 3"
        )
    compression = reduction.compression
    if compression is BFloat16:
        if factor != 1.0 or groups:
            raise ValueError(
                "Compression.bf16 sums all gradients at once in float32: it cannot be combined "
                "with gradient_predivide_factor or groups"
            )
    elif not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(f"compression must be Compression.none, fp16 or bf16, not {compression!r}")


def _accumulate(optimizer: Any, passes: int) -> None:
    """Make an optimizer accumulate the gradients of ``passes`` batches.

    Raises:
        ValueError: ``passes`` does not fit the optimizer.
    """
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


def _make_distributed(
    optimizer: Any, reduction: Reduction, name: str | None, sums_passes: bool
) -> None:
    """Change the class of an optimizer, in place, to one that reduces."""
    plain = type(optimizer)
    members = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "_reduction": reduction,
        "_sums_passes": sums_passes,
        "_name_from_user": name,
    }
    distributed = type(plain.__name__, (Distributed, plain), members)
    object.__setattr__(optimizer, "__class__", distributed)


def _synchronize_loss_scaling() -> None:
    """Make all ranks skip the same steps: otherwise one rank would wait where others skip.

    This patches Keras's class, because ``model.compile`` may wrap an optimizer later.
    """
    plain = keras.optimizers.LossScaleOptimizer.check_finite
    if hasattr(plain, "patched"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = plain(self, grads)
        inner = self.inner_optimizer
        if isinstance(inner, Distributed) and collectives().hvd.size() > 1:
            return collectives().all_finite(finite, inner._name_of_reduction())
        return finite

    check_finite.patched = plain  # type: ignore[attr-defined]
    keras.optimizers.LossScaleOptimizer.check_finite = check_finite
