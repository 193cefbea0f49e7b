"""PowerSGD (Vogels, Karimireddy, Jaggi, 2019): gradients as products of two thin matrices.

For each gradient, as an n x m matrix M with the error of earlier steps added:

    P = M Q            averaged over the ranks, then its columns are made orthonormal
    Q = transpose(M) P averaged over the ranks, and kept for the next step
    the reduced gradient is P transpose(Q); what this rank's M has more is its error

So a rank of Horovod sends r * (n + m) numbers in place of n * m, where Q and P have r columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch

from horovod_runner.integrations.compression.whole import WholeGradients


class PowerSGD(WholeGradients):
    """Sends gradients as products of two thin matrices, with error feedback.

    What a step does not send is added to the gradient of the next one. Vectors, and matrices that
    would not shrink to half, are sent as they are.

    Args:
        matrix_rank: the columns of the thin matrices, 1 or more; the same on all ranks. More
            columns send more and lose less.
        full_steps: how many steps at first send the gradients as they are, 0 or more.

    Raises:
        ValueError: an argument is out of its range.
    """

    name = "powersgd"

    def __init__(self, matrix_rank: int = 4, full_steps: int = 0) -> None:
        given = (("matrix_rank", matrix_rank, 1), ("full_steps", full_steps, 0))
        for argument, value, least in given:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"powersgd's {argument} must be a whole number of at least {least}, not "
                    f"{value!r}"
                )
        self._matrix_rank = matrix_rank
        self._full_steps = full_steps
        self._steps = 0
        self._q: dict[str, Any] = {}
        self._errors: dict[str, Any] = {}
        self._scaler: Any = None
        self._scale = 1.0  # of the losses that the errors come from
        self._unused: dict[str, Any] = {}  # memory for the next step's matrices
        self._process_set: Any = hvd.global_process_set

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; call it on every rank, because ranks communicate.

        The errors are averaged over the ranks. Training with the average on every rank continues as
        with the rank's own errors, with any number of ranks.

        Returns:
            A dict of tensors and plain values, the same on all ranks.
        """
        names = sorted(self._errors)
        errors = {}
        if names:
            own = [self._errors[name] for name in names]
            means = _means(own, f"powersgd.{names[0]}.errors", self._process_set)
            errors = {name: mean.clone() for name, mean in zip(names, means, strict=True)}
        return {
            "matrix_rank": self._matrix_rank,
            "steps": self._steps,
            "q": {name: matrix.clone() for name, matrix in self._q.items()},
            "errors": errors,
            "scale": self._scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; call it on every rank with the same state.

        Args:
            state: of :meth:`state_dict`, also from another number of ranks.

        Raises:
            ValueError: the state belongs to another ``matrix_rank``.
        """
        if state["matrix_rank"] != self._matrix_rank:
            raise ValueError(
                f"the state is of powersgd(matrix_rank={state['matrix_rank']}), and this is "
                f"powersgd(matrix_rank={self._matrix_rank}): use the same matrix_rank, or begin "
                "without the state"
            )
        self._steps = int(state["steps"])
        self._q = {name: matrix.clone() for name, matrix in state["q"].items()}
        self._errors = {name: error.clone() for name, error in state["errors"].items()}
        self._scale = float(state["scale"])

    def scaled_by(self, scaler: Any, *, is_reduced: bool) -> None:
        """Keep errors at the scale of the gradients; see :class:`WholeGradients`."""
        if is_reduced and scaler is not self._scaler:
            self._scale = scaler.get_scale()
        self._scaler = scaler

    def reduce(
        self, gradients: Mapping[str, Any], op: Any, process_set: Any, prefix: str
    ) -> dict[str, Any]:
        """Sum or average the gradients of an optimizer; see :class:`WholeGradients`.

        Raises:
            ValueError: a parameter has another shape than in earlier steps.
        """
        self._process_set = process_set
        self._steps += 1
        self._rescale_errors()
        matrices = {
            name: self._with_error(name, gradient)
            for name, gradient in gradients.items()
            if self._steps > self._full_steps and self._shrinks(gradient)
        }
        as_they_are = [name for name in gradients if name not in matrices]

        sent = [matrix @ self._q[name] for name, matrix in matrices.items()]
        whole = [gradients[name] for name in as_they_are]
        received = _means([*sent, *whole], f"{prefix}.p", process_set)
        result = dict(zip(as_they_are, received[len(sent) :], strict=True))
        if matrices:
            p = [torch.linalg.qr(each).Q for each in received[: len(sent)]]
            pairs = zip(matrices.values(), p, strict=True)
            q = [matrix.T @ columns for matrix, columns in pairs]
            q = _means(q, f"{prefix}.q", process_set)
            # A gradient that has overflowed makes all ranks skip the step, and is no error to keep.
            finite = all(bool(each.isfinite().all()) for each in (*received, *q))
            for (name, matrix), left, right in zip(matrices.items(), p, q, strict=True):
                total = _as_matrix(gradients[name])
                if finite:
                    torch.mm(left, right.T, out=total)
                    self._unused[name] = self._errors.get(name)
                    self._errors[name], self._q[name] = matrix.sub_(total), right
                else:
                    total.fill_(float("nan"))
                    self._unused[name] = matrix
                result[name] = total.reshape(gradients[name].shape)
        if op == hvd.Sum:
            return {name: total * process_set.size() for name, total in result.items()}
        return result

    def _rescale_errors(self) -> None:
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        if scale != self._scale:
            for error in self._errors.values():
                error.mul_(scale / self._scale)
        self._scale = scale

    def _shrinks(self, gradient: Any) -> bool:
        if gradient.ndim < 2:
            return False
        rows = gradient.shape[0]
        columns = gradient.numel() // max(1, rows)
        return bool(2 * self._matrix_rank * (rows + columns) <= rows * columns)

    def _with_error(self, name: str, gradient: Any) -> Any:
        """The gradient as a matrix, with the error of earlier steps; makes its first Q."""
        matrix = _as_matrix(gradient)
        if name not in self._q:
            # From the shape alone, so that it is the same on all ranks.
            generator = torch.Generator().manual_seed(matrix.shape[1])
            first = torch.randn(matrix.shape[1], self._matrix_rank, generator=generator)
            self._q[name] = first
        q = self._q[name] = self._q[name].to(matrix.device)
        error = self._errors.get(name)
        if q.shape[0] != matrix.shape[1] or (error is not None and error.shape != matrix.shape):
            raise ValueError(
                f"powersgd has an error of another shape for the parameter {name}, whose gradient "
                f"is {list(gradient.shape)}: make a new hvd.Compression.powersgd() for each "
                "optimizer and model"
            )
        if error is None:
            return matrix.clone()
        unused = self._unused.pop(name, None)
        if unused is None or unused.device != matrix.device:
            unused = torch.empty_like(matrix)
        return torch.add(matrix, error.to(matrix.device), out=unused)


def _means(tensors: list[Any], name: str, process_set: Any) -> list[Any]:
    """The means over the ranks, in one collective."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    hvd.allreduce_(flat, op=hvd.Average, name=name, process_set=process_set)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.reshape(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _as_matrix(gradient: Any) -> Any:
    """Its rows are those of the gradient; in its memory if that is contiguous float32."""
    return gradient.float().contiguous().reshape(gradient.shape[0], -1)
