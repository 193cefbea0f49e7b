"""Losses of PyTorch: weighted by rows, over several outputs, and what their means divide by."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from horovod_runner.integrations.training.torch import TorchTraining

_CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "cross_entropy", "nll_loss")


def as_list(outputs: Any) -> list[torch.Tensor]:
    """The outputs of a model, which may be a tensor, a tuple or a dict of tensors."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return list(outputs.values() if hasattr(outputs, "values") else outputs)


def total_loss(
    training: TorchTraining,
    outputs: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum of the losses of all outputs.

    Raises:
        ValueError: the model has another number of outputs than there are labels.
    """
    training.check_outputs(len(outputs))
    scales = training.loss_weights or [1.0] * len(outputs)
    total: Any = 0.0
    for number, (scale, output, label) in enumerate(zip(scales, outputs, labels, strict=True)):
        loss = training.loss_of(number)
        part = _loss(loss, output, fitted_label(loss, output, label), weight)
        total = total + scale * part if len(outputs) > 1 or scale != 1 else part
    value: torch.Tensor = total
    return value


def _loss(
    loss: Callable[..., Any],
    output: torch.Tensor,
    label: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    if weight is None:
        value: torch.Tensor = loss(output, label)
        return value
    by_row = unreduced(loss)(output, label)
    return (by_row.reshape(len(by_row), -1).mean(dim=1) * weight).mean()


def unreduced(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same loss with one value per row.

    Raises:
        TypeError: it can only be a mean.
    """
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        by_row: Any = copy.copy(loss)
        by_row.reduction = "none"
        unreduced_loss: Callable[..., Any] = by_row
        return unreduced_loss
    if "reduction" in inspect.signature(loss).parameters:
        return lambda output, label: loss(output, label, reduction="none")
    raise TypeError(
        f"sample_weight_col requires a loss with a parameter reduction, as those of torch have, "
        f"not {loss!r}"
    )


def divides_by_more_than_rows(loss: Callable[..., Any], label: torch.Tensor) -> bool:
    """Whether the mean of a loss is over the weights of classes, or over labels that count."""
    if not isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
        return False
    return loss.weight is not None or loss.ignore_index >= 0 or label.ndim > 1


def divisor_of(loss: Any, label: torch.Tensor) -> torch.Tensor:
    """What such a loss divides the sum over its labels by."""
    if label.is_floating_point() and label.ndim > 1:  # probabilities of classes
        return torch.tensor(float(len(label)), device=label.device)
    label = label.long()
    counts = label != loss.ignore_index
    if loss.weight is None:
        return counts.sum().float()
    return (loss.weight.to(label.device)[label.clamp(min=0)] * counts).sum()


def fitted_label(
    loss: Callable[..., Any], output: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    """The label as a loss takes it.

    Class numbers become whole numbers. Other labels get the output's type, and its shape where both
    have as many numbers: (rows,) against (rows, 1) would be broadcast to (rows, rows).
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    if name in _CLASS_LOSSES and label.ndim < output.ndim:
        return label.long()
    if label.shape != output.shape and label.numel() == output.numel():
        label = label.reshape(output.shape)
    return label.to(output.dtype) if output.is_floating_point() else label
