"""Losses of PyTorch: weighted by rows, over several outputs, and what their means divide by."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from horovod_runner.integrations.training.torch import TorchTraining

#: Losses whose mean may be over something else than rows.
_DIVIDED: Final = frozenset({"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"})
_CLASS_LOSSES: Final = _DIVIDED | {"MultiMarginLoss", "multi_margin_loss"}


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
    """The sum of the losses of all outputs; see :func:`losses_of`."""
    return added(losses_of(training, outputs, labels, weight))


def added(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of some losses; of one it is the loss itself."""
    return functools.reduce(operator.add, losses)


def losses_of(
    training: TorchTraining,
    outputs: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The loss of each output, times its weight.

    Raises:
        TypeError: there are weights of rows, and a loss can only be a mean.
        ValueError: the model has another number of outputs than there are labels.
    """
    training.check_outputs(len(outputs))
    scales = training.loss_weights or [1.0] * len(outputs)
    losses = []
    for number, (scale, output, label) in enumerate(zip(scales, outputs, labels, strict=True)):
        loss = training.loss_of(number)
        fitted = fitted_label(loss, output, label)
        if weight is None:
            part = loss(output, fitted)
        else:
            by_row = unreduced(loss, training.names.weight)(output, fitted)
            part = (by_row.reshape(len(by_row), -1).mean(dim=1) * weight).mean()
        losses.append(part if scale == 1 else scale * part)
    return losses


def unreduced(loss: Callable[..., Any], weight: str) -> Callable[..., Any]:
    """The same loss with one value per row; ``weight`` is what asks for it.

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
        f"{weight} requires a loss with a parameter reduction, as those of torch have, not {loss!r}"
    )


def is_sum(loss: Any) -> bool:
    """Whether a loss is the sum over rows, and not their mean."""
    return bool(_setting(loss, "reduction") == "sum")


def divisor_of(loss: Any, label: torch.Tensor) -> torch.Tensor | None:
    """What a mean over the weights of classes, or over labels that count, divides by; else None."""
    if not _is_one_of(loss, _DIVIDED):
        return None
    weight, ignored = _setting(loss, "weight"), _setting(loss, "ignore_index")
    ignored = -100 if ignored is None else ignored
    if weight is None and ignored < 0 and label.ndim <= 1:
        return None
    if label.is_floating_point() and label.ndim > 1:  # probabilities of classes
        return torch.tensor(float(len(label)), device=label.device)
    label = label.long()
    counts = label != ignored
    if weight is None:
        return counts.sum().float()
    return (weight.to(label.device)[label.clamp(min=0)] * counts).sum()


def _setting(loss: Any, name: str) -> Any:
    """What a loss was made with: a module of torch, or functools.partial; None if nothing."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get(name)
    return getattr(loss, name, None)


def _is_one_of(loss: Any, names: Collection[str]) -> bool:
    """Whether a loss has one of some names: as a function, or as a module, by its class."""
    if isinstance(loss, functools.partial):
        loss = loss.func
    # Asking a module for a name that it lacks takes longer than all the rest.
    if isinstance(loss, torch.nn.Module):
        return any(base.__name__ in names for base in type(loss).__mro__)
    return getattr(loss, "__name__", "") in names


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
    if label.ndim < output.ndim and (
        _is_one_of(loss, _CLASS_LOSSES)
        or (not label.is_floating_point() and label.numel() != output.numel())
    ):
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
