"""Keras callbacks: those that run collectives, and, by import, for the learning rate and reports.

Every rank must have those of this file in ``model.fit(callbacks=[...])``.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import keras

from horovod_runner.checkpoints.keras_copy import keras_variables
from horovod_runner.data.feed.rows_once import RowsOnce
from horovod_runner.integrations.keras.batch_counts import CollectiveCallback, by_rank
from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.keras.fitting.validation import Validated
from horovod_runner.integrations.keras.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from horovod_runner.integrations.keras.reporting import (
    LogCallback,
    ReportCallback,
    is_number,
    when_built,
)
from horovod_runner.worker import context
from horovod_runner.worker.agreement import agree
from horovod_runner.worker.api import log_to_driver, save_checkpoint
from horovod_runner.worker.checks.models import check_same_model

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "EarlyStopping",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCallback",
    "MetricAverageCallback",
    "ReduceLROnPlateau",
    "ReportCallback",
]

_METRICS = "horovod_runner.metrics"


class BroadcastGlobalVariablesCallback(CollectiveCallback):
    """Gives all ranks the weights and optimizer state of one rank, before the first batch.

    All ranks then begin equal, with random weights or with weights that one rank has loaded. At the
    end of each epoch it also checks that all ranks had the same number of batches, and, with
    ``DebugConfig(weight_check="epoch")``, that their weights are equal. MetricAverageCallback makes
    the same checks.

    Args:
        root_rank: the rank whose state is used.
        device: ignored; for compatibility.
        local_variables: variables that keep their values on each rank; None for no such variables.

    Raises:
        ValueError: in ``fit``: the ranks have different numbers of batches or epochs.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        local = [] if local_variables is None else local_variables
        self._local: list[int] = []
        self.broadcast_done = False
        for variable in local if isinstance(local, (list, tuple, set)) else [local]:
            self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Let a variable of the model or of its optimizer keep its value on each rank."""
        self._local.append(id(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if not self.broadcast_done:
            when_built(self.model, self._broadcast)

    def _broadcast(self) -> None:
        model = self.model
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if collectives().hvd.size() > 1:
            kept = self._kept(model)
            shared = [v for v in keras_variables(model) if not {id(v), id(v.value)} & kept]
            # Keras may name a weight otherwise on a rank that builds its layers in another order.
            check_same_model(((v.path, v.shape) for v in shared), same_names=False)
            collectives().broadcast_variables(shared, self._root_rank)
        self.broadcast_done = True

    def _kept(self, model: Any) -> set[int]:
        """The ids of local variables, and of what the optimizer keeps for them."""
        local = set(self._local)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if not local or not hasattr(optimizer, "slots_of"):
            return local
        variables = [v for v in model.variables if {id(v), id(v.value)} & local]
        return local | {id(slot) for slot in optimizer.slots_of(variables)}


class MetricAverageCallback(CollectiveCallback):
    """Averages the metrics of an epoch over the ranks, for all callbacks, in any order.

    A metric that another callback adds is averaged, too, if that callback comes before this one.
    The metrics of a validation on a Shard's rows are not averaged but computed over all rows: see
    the page about Keras.

    Args:
        device: ignored: numbers are averaged on the CPU; for compatibility.

    Raises:
        ValueError: in ``fit``: the ranks have different metrics, batches or epochs.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._averaged: set[str] = set()  # in this epoch, before the other callbacks

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._averaged:
            super().on_epoch_end(epoch, logs)
        self._average(logs)
        self._averaged = set()

    def average_first(self, epoch: int, logs: Any, validated: Validated | None) -> None:
        """Average before other callbacks see the metrics; ``validated`` on a Shard's rows."""
        super().on_epoch_end(epoch, logs)
        self._average(logs, validated)
        self._averaged = set(logs or ())

    def _average(self, logs: Any, validated: Validated | None = None) -> None:
        backend = collectives()
        if not logs or backend.hvd.size() == 1:
            return
        numbers = {name: float(value) for name, value in logs.items() if is_number(value)}
        names = sorted(numbers)
        layout = [] if validated is None else validated.layout
        here = [len(names), zlib.crc32("\n".join([*names, *layout]).encode())]
        rows = backend.gather(here, "horovod_runner.metrics.names")
        if rows.count(here) != len(rows):
            raise ValueError(
                f"the ranks have different metrics: {by_rank([count for count, _ in rows])}; "
                f"rank {backend.hvd.rank()} has {', '.join(names)}. If a callback adds a metric on "
                "some ranks only, put it after MetricAverageCallback"
            )
        exact = {} if validated is None else validated.metrics()
        exact = {f"val_{name}": value for name, value in exact.items() if f"val_{name}" in logs}
        logs.update(exact)
        names = [name for name in names if name not in self._averaged]
        if names:
            averages = backend.average([float(logs[name]) for name in names], _METRICS)
            logs.update(zip(names, averages, strict=True))


class _AverageFirst(keras.callbacks.Callback):  # type: ignore[misc]
    """Stands before all other callbacks, and averages for the one in the user's list."""

    def __init__(self, average: MetricAverageCallback, rows: RowsOnce[Any] | None) -> None:
        super().__init__()
        self._average = average
        self._rows = rows
        self._validated: Validated | None = None

    def on_test_end(self, logs: Any = None) -> None:
        if self._rows is not None and collectives().hvd.size() > 1:
            self._validated = Validated(self.model, self._rows.rows > 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        validated, self._validated = self._validated, None
        self._average.average_first(epoch, logs, validated)


def averaged_first(callbacks: Any, rows: RowsOnce[Any] | None) -> Any:
    """The callbacks of a ``fit``, with metrics averaged before the first of them.

    ``rows`` is what the validation counts; None for data that are not a Shard's.
    """
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    each = callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])
    average = next((c for c in each if isinstance(c, MetricAverageCallback)), None)
    if average is None:
        return callbacks
    first = _AverageFirst(average, rows)
    if not is_list:
        return [first, *each]
    first.set_model(callbacks.model)
    each.insert(0, first)
    return callbacks


class BestModelCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model on rank 0 at the end of each epoch that is better than all before.

    An epoch without the metric saves nothing; a line says so once. Neither does one in which it is
    NaN. A ``fit`` that goes on after a restart knows the best epoch before: of the checkpoints that
    the run resumes from, or, with ``filepath``, by a small file beside that of the model.

    Args:
        monitor: the metric to compare; use MetricAverageCallback, too, for that of all ranks.
        verbose: 1 prints a line for each saved model.
        mode: "min", "max", or "auto", which is "max" for metrics with "acc", "auc", "f1",
            "precision" or "recall" in the name.
        save_freq: "epoch".
        filepath: the path of a ``.keras`` file; ``{epoch}`` and the names of metrics are replaced
            by their values. None passes the model to ``save_checkpoint``.

    Raises:
        ValueError: ``save_freq`` or ``mode`` is unknown.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: str = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if save_freq != "epoch":
            raise ValueError(
                f"save_freq must be 'epoch', not {save_freq!r}: metrics are averaged once per epoch"
            )
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', not {mode!r}")
        self.monitor = monitor
        self.verbose = verbose
        self.filepath = filepath
        marks = ("acc", "auc", "f1", "precision", "recall")
        higher = any(mark in monitor.lower() for mark in marks)
        self._sign = 1 if mode == "max" or (mode == "auto" and higher) else -1
        self.best: float | None = None
        self._warned = False
        self._begins = False  # whether the next epoch is the first one of a fit

    def on_train_begin(self, logs: Any = None) -> None:
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        goes_on, self._begins = self._begins and epoch > 0, False
        if goes_on and self.best is None and collectives().hvd.rank() == 0:
            self.best = self._best_before()

    def _best_before(self) -> float | None:
        """The best value before this fit; None if it is not known."""
        if self.filepath is not None:
            with suppress(OSError, ValueError):  # another host has it, or there is none
                return float(self._kept().read_text())
            return None
        rank = context.current()
        markers = () if rank is None else rank.checkpoints.resume
        values = [marker.metrics.get(self.monitor, math.nan) for marker in markers]
        numbers = [value for value in values if not math.isnan(value)]
        return max(numbers, key=lambda value: self._sign * value, default=None)

    def _kept(self) -> Path:
        """The file with the best value, beside that of the model."""
        start = os.fspath(self.filepath or "").partition("{")[0]
        return Path(f"{start}.best-{self.monitor}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if collectives().hvd.rank() != 0:
            return
        logs = logs or {}
        if self.monitor not in logs:
            self._warn_once(logs)
            return
        value = float(logs[self.monitor])
        least = -math.inf if self.best is None else self._sign * self.best
        if not self._sign * value > least:  # nor where it is NaN
            return
        self.best = value
        if self.filepath is None:
            steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
            save_checkpoint(self.model, steps, {self.monitor: value, "epoch": epoch + 1})
        else:
            self.model.save(os.fspath(self.filepath).format(epoch=epoch + 1, **logs))
            with suppress(OSError):
                self._kept().write_text(repr(value))
        if self.verbose:
            print(f"\nEpoch {epoch + 1}: saved the model, {self.monitor}={value:g} is the best.")

    def _warn_once(self, logs: Mapping[str, Any]) -> None:
        """Warn that no model is saved: as Keras's own callback, which does not end the training."""
        if not self._warned:
            self._warned = True
            log_to_driver(
                f"HorovodRunner: BestModelCheckpoint saves no model after an epoch without "
                f"{self.monitor!r}, which it monitors. The metrics of this epoch are "
                f"{', '.join(logs) or 'none'}: set monitor to one of them, or pass "
                "validation_data to fit for those that begin with val_"
            )


class _DecidesTogether:
    """A mixin in front of a callback: it sees the mean of its metric over the ranks."""

    monitor: str

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        mean = agree((logs or {}).get(self.monitor, math.nan), "mean")
        averaged = {**(logs or {}), self.monitor: mean}
        if math.isnan(mean):  # Keras says so where a metric is missing
            del averaged[self.monitor]
        super().on_epoch_end(epoch, averaged)  # type: ignore[misc]
        if isinstance(logs, dict) and "learning_rate" in averaged:
            logs["learning_rate"] = averaged["learning_rate"]


class EarlyStopping(_DecidesTogether, keras.callbacks.EarlyStopping):  # type: ignore[misc]
    """Stops all ranks, when the mean of a metric over the ranks improves no more.

    Keras's own callback compares the rank's own metric, unless MetricAverageCallback is in the
    list: then one rank stops, and the others wait for it. Use this one on every rank.
    """


class ReduceLROnPlateau(_DecidesTogether, keras.callbacks.ReduceLROnPlateau):  # type: ignore[misc]
    """Lowers the learning rate of all ranks, when the mean of a metric improves no more.

    Use it on every rank. With Keras's own callback, and without MetricAverageCallback in the list,
    ranks train with different learning rates.
    """
