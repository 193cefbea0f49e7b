"""Metrics of a validation over the rows of all ranks: the states of the metrics are added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from horovod_runner.wire.collectives import connected


class Validated:
    """The states of a model's metrics after this rank's part of a validation.

    A metric of Keras keeps sums and counts. Those of all ranks together give the metric of one
    process over all rows, also where a mean of the ranks' metrics does not, as for AUC. The states
    of a rank whose part has no rows are left out.
    """

    def __init__(self, model: Any, has_rows: bool) -> None:
        self._model = model
        self._variables = [v for metric in _summed(model.metrics) for v in metric.variables]
        # All ranks must have states alike.
        self.layout = [str(tuple(variable.shape)) for variable in self._variables]
        flat = [np.float64(_array(variable)).ravel() for variable in self._variables]
        self._states = np.concatenate(flat) * has_rows if flat else np.zeros(0)

    def metrics(self) -> dict[str, Any]:
        """The metrics over the rows of all ranks, by name; call it on every rank."""
        if not len(self._states):
            return {}
        total = connected("fit adds up the metrics of the ranks").add(self._states)
        before = [_array(variable) for variable in self._variables]
        start = 0
        for variable, array in zip(self._variables, before, strict=True):
            part = total[start : start + array.size]
            variable.assign(part.reshape(array.shape).astype(array.dtype))
            start += array.size
        results: dict[str, Any] = self._model.get_metrics_result()
        for variable, array in zip(self._variables, before, strict=True):
            variable.assign(array)
        return results


def _array(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable))


def _summed(metrics: Any) -> Iterator[Any]:
    """The metrics whose states of several ranks can be added."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if inner is not None and type(metric).__name__ == "CompileMetrics":
            yield from _summed(inner)
        elif _starts_with_zeros(metric):
            yield metric


def _starts_with_zeros(metric: Any) -> bool:
    """Whether a metric is Keras's own, or one whose state is zero before the first batch."""
    owner = next((k for k in type(metric).__mro__ if "update_state" in vars(k)), None)
    if owner is None or owner.__module__.startswith("keras."):
        return True
    kept = [_array(variable) for variable in metric.variables]
    metric.reset_state()
    is_zero = not any(_array(variable).any() for variable in metric.variables)
    for variable, array in zip(metric.variables, kept, strict=True):
        variable.assign(array)
    return is_zero
