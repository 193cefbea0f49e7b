"""Metrics of torch by name, as means over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from horovod_runner.integrations.training.classes import loss_name
from horovod_runner.integrations.training.training import Metric


def accuracy(output: Any, label: Any, threshold: float = 0.0) -> Any:
    """The share of rows whose class is right.

    Args:
        output: scores of classes, of shape (rows, classes, ...); or one score for each row.
        label: the classes.
        threshold: one score means the class 1 above it.
    """
    if output.ndim > 1 and output.shape[1] > 1:
        chosen = output.argmax(1)
        if label.ndim == output.ndim:  # probabilities of classes
            label = label.argmax(1)
    else:
        chosen = output > threshold
    return (chosen == label.reshape(chosen.shape)).double().mean()


def accuracy_of_probabilities(output: Any, label: Any) -> Any:
    """The same, where one score is the probability of the class 1."""
    return accuracy(output, label, 0.5)


def mae(output: Any, label: Any) -> Any:
    """The mean absolute error."""
    return (output - label).abs().double().mean()


def mse(output: Any, label: Any) -> Any:
    """The mean squared error."""
    return (output - label).square().double().mean()


_KNOWN: Final[Mapping[str, Callable[..., Any]]] = {
    "accuracy": accuracy,
    "acc": accuracy,
    "mae": mae,
    "mse": mse,
}
_OF_PROBABILITIES: Final = ("BCELoss", "binary_cross_entropy")


def metrics_of(kind: str, metrics: Sequence[Any] | Mapping[str, Any], loss: Any) -> Any:
    """The metrics of a training as its framework takes them; the loss says what scores are.

    Raises:
        TypeError: a metric is neither a name nor a function.
        ValueError: there is no metric of a name, or two have one name.
    """
    if kind != "torch":
        return list(metrics) if not isinstance(metrics, Mapping) else metrics
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        raise TypeError(f"metrics must be a list, or a dict by name, not {metrics!r}")
    named = metrics if isinstance(metrics, Mapping) else {_name(each): each for each in metrics}
    if len(named) < len(metrics):
        names = ", ".join(map(_name, metrics))
        raise ValueError(
            f"two metrics have one name, of {names}: name them by a dict, as "
            "metrics={'mae': function, 'mse': other}"
        )
    functions = {name: _function(each) for name, each in named.items()}
    if loss_name(loss) in _OF_PROBABILITIES:
        functions = {
            name: accuracy_of_probabilities if function is accuracy else function
            for name, function in functions.items()
        }
    return {name: Metric(function) for name, function in functions.items()}


def _name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "__name__", type(metric).__name__))


def _function(metric: Any) -> Callable[..., Any]:
    if isinstance(metric, str):
        if metric not in _KNOWN:
            raise ValueError(
                f"there is no metric {metric!r}: the names are {', '.join(_KNOWN)}. Any function "
                "of (output, label) that returns a mean over rows is a metric, too"
            )
        return _KNOWN[metric]
    if not callable(metric):
        raise TypeError(f"a metric must be a name or a function of (output, label), not {metric!r}")
    function: Callable[..., Any] = metric
    return function
