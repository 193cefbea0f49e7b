"""Compression of all gradients of an optimizer together, in ``horovod.torch``.

Horovod's own ``compress`` and ``decompress`` see one gradient, and one sum between them. PowerSGD
needs two sums, and with one for each gradient a slow network would delay every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from horovod_runner.worker.imports.patches import instead_of


class WholeGradients:
    """A compression that reduces all gradients of an optimizer at once."""

    name = ""

    def begin(self, name: str, gradient: Any, process_set: Any, prefix: str) -> None:
        """Begin to reduce a gradient, if that is of use before all others are there."""

    def scaled_by(self, scaler: Any, *, is_reduced: bool) -> None:
        """Note which ``GradScaler`` has scaled the losses; it may change the scale after each step.

        It is called before the gradients of a step are divided; ``is_reduced`` if they were reduced
        before.
        """

    def reduce(
        self, gradients: Mapping[str, Any], op: Any, process_set: Any, prefix: str
    ) -> dict[str, Any]:
        """Sum or average gradients over the ranks, by Horovod's ``op``.

        They are tensors of floating point numbers by the name of the parameter, in an order that is
        the same on all ranks, and may be overwritten. The reduced ones have the same shapes. The
        names of the collectives begin with ``prefix``.
        """
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> Any:
        """Refuse single tensors."""
        raise ValueError(
            f"Compression.{cls.name} compresses all gradients of an optimizer together: it works "
            "only as hvd.DistributedOptimizer(..., compression=...). For a single tensor use "
            "Compression.none or fp16"
        )

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor: it is complete."""
        return tensor


class _Later:
    """A gradient that is reduced together with all others, when it is needed."""

    def __init__(self, optimizer: Any, parameter: Any) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._dense: Any = None
        self._sum: Any = None

    def __call__(self) -> Any:
        """Return the reduced gradient; Horovod calls it in ``synchronize``."""
        if self._sum is None:
            _reduce_all(self._optimizer)
        result, self._sum = self._sum, None
        return result

    def gradient(self, name: str) -> Any:
        """The gradient of this rank, dense."""
        gradient = self._parameter.grad
        kind = self._optimizer._compression.name
        if gradient.is_sparse:
            if not self._optimizer.sparse_as_dense:
                raise ValueError(
                    f"Compression.{kind} cannot compress the sparse gradient of {name}: set "
                    "sparse_as_dense=True, or give that parameter an optimizer without compression"
                )
            if self._dense is None:
                self._dense = gradient.to_dense()
            gradient = self._dense
        if not gradient.is_floating_point():
            raise ValueError(
                f"Compression.{kind} cannot compress the gradient of {name}, whose type is "
                f"{gradient.dtype}: give that parameter an optimizer without compression"
            )
        return gradient

    def prefix(self) -> str:
        """Of collectives: Horovod's names, which those of another optimizer do not share."""
        optimizer = self._optimizer
        return f"{optimizer._compression.name}.{optimizer._parameter_names[self._parameter]}"

    def put(self, total: Any) -> None:
        """Keep the reduced gradient."""
        self._sum = total.to(self._parameter.grad.dtype)


def _reduce_all(optimizer: Any) -> None:
    waiting = {
        _name(optimizer, parameter): handle
        for parameter, (handle, _) in optimizer._handles.items()
        if isinstance(handle, _Later)
    }
    names = sorted(waiting)  # ranks compute their gradients in different orders
    gradients = {name: waiting[name].gradient(name) for name in names}
    compression = optimizer._compression
    prefix = waiting[names[0]].prefix()
    with torch.no_grad():
        sums = compression.reduce(gradients, optimizer.op, optimizer.process_set, prefix)
    for name, total in sums.items():
        waiting[name].put(total)


def _name(optimizer: Any, parameter: Any) -> str:
    """The name that the user gave a parameter, for states and errors."""
    name: str = optimizer._own_names.get(parameter) or optimizer._parameter_names[parameter]
    return name


def patch_optimizer(module: Any) -> None:
    """Make Horovod's optimizer know these compressions; for ``horovod.torch.optimizer``."""

    @instead_of(module._DistributedOptimizer, "_allreduce_grad_async")
    def allreduce_grad_async(plain: Any, self: Any, parameter: Any) -> Any:
        if not isinstance(self._compression, WholeGradients):
            return plain(self, parameter)
        if parameter.grad is None:  # other ranks may have it
            parameter.grad = parameter.data.new_zeros(parameter.shape)
        name, later = _name(self, parameter), _Later(self, parameter)
        with torch.no_grad():
            gradient = later.gradient(name)
            self._compression.begin(name, gradient, self.process_set, later.prefix())
        return later, None

    @instead_of(module, "DistributedOptimizer")
    def wrap(plain: Any, *args: Any, **options: Any) -> Any:
        given = signature(plain).bind(*args, **options).arguments
        compression = given.get("compression")
        if isinstance(compression, type) and issubclass(compression, WholeGradients):
            compression = given["compression"] = compression()
        if isinstance(compression, WholeGradients):
            _check(compression.name, given, module)
        return plain(**given)


def _check(name: str, given: Mapping[str, Any], module: Any) -> None:
    op = given.get("op", module.Average)
    if op not in (module.Average, module.Sum):
        adasum = " (Adasum combines gradients by their angles)" if op == module.Adasum else ""
        raise ValueError(
            f"Compression.{name} requires op=hvd.Average or hvd.Sum: it sends what has to be "
            f"added up{adasum}. Use Compression.none or fp16 with other operations"
        )
    if given.get("gradient_predivide_factor", 1.0) != 1.0:
        raise ValueError(
            f"Compression.{name} adds in float32 and needs no gradient_predivide_factor: leave it "
            "out, or use Compression.fp16"
        )
    if given.get("groups") or given.get("num_groups"):
        raise ValueError(
            f"Compression.{name} sends all gradients together: leave groups out, or use "
            "Compression.none or fp16"
        )
