"""Losses of PyTorch: weighted by rows, over several outputs, and what their means divide by."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Sequence
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
        fitted = fitted_label(loss, output, label)
        if weight is None:
            part = loss(output, fitted)
        else:
            by_row = unreduced(loss)(output, fitted)
            part = (by_row.reshape(len(by_row), -1).mean(dim=1) * weight).mean()
        total = total + scale * part if len(outputs) > 1 or scale != 1 else part
    value: torch.Tensor = total
    return value


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


def divisor_of(loss: Any, label: torch.Tensor) -> torch.Tensor | None:
    """What a mean over the weights of classes, or over labels that count, divides by; else None."""
    if not isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
        return None
    if loss.weight is None and loss.ignore_index < 0 and label.ndim <= 1:
        return None
    if label.is_floating_point() and label.ndim > 1:  # probabilities of classes
        return torch.tensor(float(len(label)), device=label.device)
    label = label.long()
    counts = label != loss.ignore_index
    if loss.weight is None:
        return counts.sum().float()
    return (loss.weight.to(label.device)[label.clamp(min=0)] * counts).sum()


def fitted_label(
    loss: Callable[..., Any],
    output: torch.Tensor,
    label: torch.Tensor,
    function: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """The label as a loss takes it.

    Class numbers become whole numbers. Other labels get the output's type, and its shape where both
    have as many numbers: (rows,) against (rows, 1) would be broadcast to (rows, rows). A function
    that takes the one column of the output itself, as ``output[:, 0]``, gets (rows,).

    ``function`` is a metric that gets the label in the loss's place.
    """
    # Asking a module for a name that it lacks takes longer than all the rest.
    named = type(loss) if isinstance(loss, torch.nn.Module) else loss
    name = getattr(named, "__name__", type(loss).__name__)
    if name in _CLASS_LOSSES and label.ndim < output.ndim:
        return label.long()
    if label.shape != output.shape and label.numel() == output.numel():
        is_column = label.ndim == 1 and output.ndim == 2
        if not (is_column and _takes_column(function or loss)):
            label = label.reshape(output.shape)
    return label.to(output.dtype) if output.is_floating_point() else label


def _takes_column(function: Callable[..., Any]) -> bool:
    """Whether a function of outputs of shape (rows, 1) compares them with labels of shape (rows,).

    It is tried: where shapes are broadcast to (rows, rows), the order of the labels does not count.
    """
    home = getattr(function, "__module__", None) or type(function).__module__
    if home.partition(".")[0] in {"torch", "horovod_runner"} or not isinstance(function, Hashable):
        return False
    return _tried(function)


@functools.lru_cache
def _tried(function: Callable[..., Any]) -> bool:
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).cpu()
    logits = torch.tensor([[-1.0], [0.3], [2.0]])
    label, other = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])

    def tells_apart(output: torch.Tensor, *labels: torch.Tensor) -> bool:
        try:
            one, two = (torch.as_tensor(function(output, each)) for each in labels)
            return not torch.allclose(one, two)
        except Exception:  # of the user's function, which does not take these
            return False

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried = [(output, label, other) for output in (logits, logits.sigmoid())]
        return any(tells_apart(*each) for each in tried) and not any(
            tells_apart(output, *(each[:, None] for each in labels)) for output, *labels in tried
        )
