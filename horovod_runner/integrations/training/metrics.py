"""Metrics of torch by name, as means over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from horovod_runner.integrations.training.training import Metric


def accuracy(output: Any, label: Any) -> Any:
    """The share of rows whose class is right.

    Args:
        output: scores of classes, of shape (rows, classes, ...); or one score for each row, whose
            class is 1 above 0.
        label: the classes.
    """
    if output.ndim > 1 and output.shape[1] > 1:
        chosen = output.argmax(1)
        if label.ndim == output.ndim:  # probabilities of classes
            label = label.argmax(1)
    else:
        chosen = output > 0
    return (chosen == label.reshape(chosen.shape)).double().mean()


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


def metrics_of(kind: str, metrics: Sequence[Any] | Mapping[str, Any]) -> Any:
    """The metrics of a training as its framework takes them.

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
    return {name: Metric(_function(each)) for name, each in named.items()}


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
