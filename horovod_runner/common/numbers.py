"""Validates metrics, steps and epochs, and converts them to plain Python numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

# The columns of the table of reports that are not metrics.
COLUMNS: Final = ("rank", "attempt", "step", "epoch", "time")
_COLUMNS: Final = frozenset(COLUMNS)
#: Names that ``report`` does not take as those of metrics: callbacks of frameworks leave them out.
RESERVED: Final = (*COLUMNS, "total_steps")
_PLAIN = (float, int)
_LEAST, _MOST = -(2**63), 2**63 - 1


def check_report(
    metrics: Mapping[str, Any], step: Any, epoch: Any
) -> tuple[Mapping[str, float | int], int | None, int | None]:
    """Convert the arguments of ``report`` to plain numbers.

    Raises:
        TypeError: a metric is not a number, or a step or an epoch is not a whole number.
        ValueError: a metric is named like one of ``COLUMNS``, or a step or an epoch does not fit
            into 64 bits.
    """
    # A training loop waits for this call: plain floats and ints are not converted.
    if not _COLUMNS.isdisjoint(metrics):
        check_names(metrics)
    for value in metrics.values():
        if type(value) is not float:
            metrics = _numbers(metrics)
            break
    if step is not None and (type(step) is not int or not _LEAST <= step <= _MOST):
        step = plain_int("step", step)
    if epoch is not None and (type(epoch) is not int or not _LEAST <= epoch <= _MOST):
        epoch = plain_int("epoch", epoch)
    return metrics, step, epoch


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    numbers: dict[str, float | int] = {}
    for name, value in metrics.items():
        plain = value if type(value) in _PLAIN else plain_number(name, value)
        numbers[name] = plain if type(plain) is float or _LEAST <= plain <= _MOST else float(plain)
    return numbers


def check_names(names: Iterable[str]) -> None:
    """Raise a ValueError for a metric that is named like a column of the table of reports."""
    for name in names:
        if name in COLUMNS:
            raise ValueError(
                f"a metric cannot be named {name!r}: every report has the columns "
                f"{', '.join(COLUMNS)}. Choose another name."
            )


def check_saved(step: Any, metrics: Mapping[str, Any] | None) -> tuple[int, dict[str, float | int]]:
    """Convert the step and the metrics of a checkpoint or commit to plain numbers.

    Raises:
        TypeError: a metric is not a number, or the step is not a whole number.
        ValueError: the step is below 0.
    """
    step = plain_int("step", step)
    if step < 0:
        raise ValueError(f"step is the number of finished steps and cannot be {step}")
    return step, {} if metrics is None else plain_metrics(metrics)


def plain_metrics(metrics: Any) -> dict[str, float | int]:
    """Convert the metrics of a checkpoint to plain numbers, or raise a TypeError."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of numbers, not {type(metrics).__qualname__}")
    for name in metrics:
        if not isinstance(name, str):
            kind = type(name).__qualname__
            raise TypeError(f"a metric's name must be a string, not {kind} ({name!r:.80})")
    return _numbers(metrics)


def plain_number(name: str, value: Any) -> float | int:
    """Convert a number, or a scalar of NumPy, torch or TensorFlow, to a plain number.

    Booleans become 0 and 1. Raises a TypeError, with the metric's name, for anything else.
    """
    plain: Any = value
    if not isinstance(value, (int, float)):
        if getattr(value, "shape", None) is None or isinstance(value, type):
            raise _not_a_number(name, value)
        try:
            # TensorFlow's tensors have no item(), and those in a graph have no value at all.
            plain = value.item() if hasattr(value, "item") else value.numpy().item()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            raise _not_a_number(name, value) from None
    if isinstance(plain, bool) or type(plain).__name__ == "bool":
        return int(plain)
    if isinstance(plain, int):
        return int(plain)
    if isinstance(plain, float):
        return float(plain)
    raise _not_a_number(name, value)


def _not_a_number(name: str, value: Any) -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shape = getattr(value, "shape", None)
    shaped = f" of shape {tuple(shape)}" if isinstance(shape, (tuple, list)) else ""
    return TypeError(
        f"the metric {name!r} must be a number, or a scalar of NumPy, torch or TensorFlow, got "
        f"{kind}{shaped}. Reduce it to one number (its mean, say), or leave it out."
    )


def check_interval(name: str, value: Any) -> int:
    """Return the interval of a callback, 0 (never) or more, or raise a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, 0 or more, not {value!r}")
    return value


def plain_int(name: str, value: Any) -> int:
    """Convert a step or an epoch to an int.

    Raises:
        TypeError: ``value`` is not a whole number.
        ValueError: it does not fit into 64 bits.
    """
    if type(value) is int and _LEAST <= value <= _MOST:
        return value
    plain = value
    with suppress(TypeError):
        plain = plain_number(name, value)
    if isinstance(value, bool) or not isinstance(plain, int):
        kind = type(value).__qualname__
        raise TypeError(f"{name} must be a whole number, not {kind} ({value!r:.80})")
    if not _LEAST <= plain <= _MOST:
        raise ValueError(f"{name} must fit into 64 bits, and {plain} does not")
    return plain
