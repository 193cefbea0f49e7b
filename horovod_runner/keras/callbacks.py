"""Horovod's callbacks for ``model.fit``, and those that tell the driver how it goes.

Those of Horovod have to be in the ``callbacks`` of every rank: they reduce.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import keras

from horovod_runner.context import save_checkpoint
from horovod_runner.keras.collectives import collectives
from horovod_runner.keras.reporting import LogCallback, ReportCallback, check_epoch
from horovod_runner.states import keras_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCallback",
    "MetricAverageCallback",
    "ReportCallback",
]


class _Collective(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that reduces: it makes sure that all ranks come to the same place.

    A rank with fewer batches than the others would have its next epoch's gradients paired with
    their last ones', or wait for ever.
    """

    # Keras need not wait for a batch's metrics before it trains the next one.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._batches = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # TensorFlow compiles with XLA where there is a GPU, and XLA knows no collective of Horovod.
        compiled = keras.backend.backend() == "tensorflow" and getattr(model, "jit_compile", False)
        if compiled and collectives().hvd.size() > 1:
            model.jit_compile = False
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        own = collectives()
        if own.hvd.size() == 1:
            return
        steps = self.params.get("steps")
        found = own.gather([-1 if steps is None else int(steps)], "horovod_runner.steps")
        counts = [count for (count,) in found]
        if len(set(counts)) > 1 and -1 not in counts:
            raise ValueError(
                f"the ranks have different numbers of batches an epoch: {_by_rank(counts)}. Each "
                "batch is paired with one of every other rank: give all of them the same number, "
                f"steps_per_epoch={min(counts)}, or a Shard's batches, which wrap around"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Not the optimizer's count: TensorFlow counts the batch that turns out not to be there.
        self._batches = max(self._batches, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._meet(ended=False)
        check_epoch(self.model, epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        self._meet(ended=True)

    def _meet(self, *, ended: bool) -> None:
        """Wait for all ranks, whatever they have left to do, and compare what they did."""
        own = collectives()
        if own.hvd.size() == 1:
            return
        if own.can_join():
            try:
                own.join()
            except Exception as error:
                # As Horovod's own: where another rank failed, it is that one's error that counts.
                raise RuntimeError(
                    f"Horovod has been shut down while this rank, which had {self._batches} "
                    f"batches in epoch {self._epoch + 1}, waited for the others. Either one of "
                    "them failed, or it had more batches: with sparse gradients these cannot be "
                    "reduced without this rank. Give all ranks the same number (steps_per_epoch, "
                    "or a Shard's batches), or use sparse_as_dense=True to be told the numbers"
                ) from error
        here = [self._epoch, self._batches, int(ended)]
        found = own.gather(here, "horovod_runner.epoch")
        if found.count(here) == len(found):
            return
        if len({epoch for epoch, _, _ in found}) > 1 or len({end for *_, end in found}) > 1:
            told = _by_rank([epoch + 1 for epoch, _, _ in found])
            raise ValueError(
                f"the ranks did not begin as many epochs: {told}. Where a callback ends the "
                "training (EarlyStopping), put MetricAverageCallback before it, so that all ranks "
                "decide by the same numbers"
            )
        counts = [batches for _, batches, _ in found]
        raise ValueError(
            f"the ranks had different numbers of batches in epoch {self._epoch + 1}: "
            f"{_by_rank(counts)}. What the last ones did to the weights is wrong: give all ranks "
            f"the same number, steps_per_epoch={min(counts)}, or a Shard's batches, which wrap "
            "around"
        )


class BroadcastGlobalVariablesCallback(_Collective):
    """Gives all ranks the weights and the optimizer's state of one of them, before the first batch.

    So they begin equal, whether the weights are random or were loaded on that rank alone. At the
    end of each epoch it makes sure that all ranks had as many batches, and with
    ``HorovodRunner(..., check_sync="epoch")`` that their weights are equal (as do the others here).

    Args:
        root_rank: whose values.
        device: taken for older code; TensorFlow's device to broadcast on.
        local_variables: variables to leave as they are on each rank.

    Raises:
        ValueError: the ranks have different numbers of batches or epochs.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        local = [] if local_variables is None else local_variables
        local = local if isinstance(local, (list, tuple, set)) else [local]
        self._local = [id(variable) for variable in local]
        self.broadcast_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self.broadcast_done:
            return
        if _is_built(self.model):
            self._broadcast()
        else:
            self._broadcast_later()

    def _broadcast_later(self) -> None:
        """Broadcast at the first batch, whose shapes TensorFlow's models without input wait for."""
        model, train = self.model, self.model.train_function

        def first(iterator: Any) -> Any:
            model.train_function = train
            # A model that only a real batch can build is broadcast after it, as Horovod does.
            with suppress(Exception):
                model._symbolic_build(data_batch=iterator.element_spec)
            if _is_built(model):
                self._broadcast()
                return train(iterator)
            logs = train(iterator)
            self._broadcast()
            return logs

        model.train_function = first

    def _broadcast(self) -> None:
        model = self.model
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if collectives().hvd.size() > 1:
            kept = [
                v for v in keras_variables(model) if not {id(v), id(v.value)} & set(self._local)
            ]
            collectives().broadcast_variables(kept, self._root_rank)
        self.broadcast_done = True


class MetricAverageCallback(_Collective):
    """Averages the metrics of an epoch over the ranks, for all callbacks after it in the list.

    Put it before EarlyStopping, ReduceLROnPlateau, ReportCallback and all others that read metrics.

    Args:
        device: taken for older code and without a meaning: numbers are averaged on the CPU.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        own = collectives()
        if not logs or own.hvd.size() == 1:
            return
        numbers = {name: float(value) for name, value in logs.items() if _is_number(value)}
        names = sorted(numbers)
        here = [len(names), zlib.crc32("\n".join(names).encode())]
        found = own.gather(here, "horovod_runner.metrics.names")
        if found.count(here) != len(found):
            raise ValueError(
                f"the ranks have different metrics: {_by_rank([count for count, _ in found])}; "
                f"rank {own.hvd.rank()} has {', '.join(names)}. Callbacks that add some for one "
                "rank alone belong after MetricAverageCallback"
            )
        averaged = own.average([numbers[name] for name in names], "horovod_runner.metrics")
        logs.update(zip(names, averaged, strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch; or a number, to the power of the epochs since
            ``start_epoch``.
        start_epoch: the first epoch that this is for.
        end_epoch: the first one that it is no longer for; None: there is none.
        staircase: once at the beginning of each epoch; without, before each batch, where the epoch
            is a fraction.
        momentum_correction: whether SGD's and RMSprop's momentum follows the learning rate (Goyal
            et al., arXiv:1706.02677, 2.2).
        steps_per_epoch: batches an epoch, where Keras cannot know them.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required: the learning rate that is multiplied")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else self._power(multiplier)
        self._epoch = 0

    def _power(self, base: float) -> Callable[[float], float]:
        return lambda epoch: float(base ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        schedule = getattr(self._optimizer, "_learning_rate", None)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(
                f"the optimizer has a schedule of learning rates ({type(schedule).__name__}), and "
                f"{type(self).__name__} sets them, too: use one of them"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} has to know how many batches an epoch has, and Keras "
                    "cannot tell with this data: give it steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.multiplier(self._epoch + batch / (self.steps_per_epoch or 1)))
        elif batch == 0:
            self._set(self.multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    @property
    def _optimizer(self) -> Any:
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def _set(self, multiplier: float) -> None:
        before, now = self._learning_rate(), self.initial_lr * multiplier
        self._optimizer.learning_rate = now
        # In Keras the learning rate is in what SGD and RMSprop keep of former gradients.
        if self.momentum_correction and before and now != before and self._optimizer.built:
            kept = getattr(self._optimizer, "momentums", None)
            kept = getattr(self._optimizer, "_momentums", None) if kept is None else kept
            if getattr(self._optimizer, "momentum", 0) and kept:
                collectives().scale_variables([v for v in kept if v is not None], now / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, batch by batch.

    With more ranks the global batch is larger, and takes a larger learning rate once the weights
    have settled (Goyal et al., arXiv:1706.02677).

    Args:
        initial_lr: the learning rate after the warm-up, ``0.001 * hvd.size()`` say.
        warmup_epochs: how long it takes.
        momentum_correction: see LearningRateScheduleCallback.
        steps_per_epoch: batches an epoch, where Keras cannot know them.
        verbose: 1 prints a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warm,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def _warm(self, epoch: float) -> float:
        size = collectives().hvd.size()
        done = (epoch + 1 / (self.steps_per_epoch or 1)) / (self.end_epoch or 1)
        return float((1 + min(1.0, done) * (size - 1)) / size)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if last and self.verbose and collectives().hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the warm-up ends at {self._learning_rate():g}.")


class BestModelCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model at the end of each epoch that is better than all before; rank 0 alone does.

    Args:
        monitor: the metric that tells; put MetricAverageCallback before this.
        verbose: 1 prints a line for each model that is saved.
        mode: "min", "max", or "auto": "max" for what has "acc", "auc", "f1", "precision" or
            "recall" in its name.
        save_freq: "epoch".
        filepath: a ``.keras`` file, in which ``{epoch}`` and the metrics are filled in; None hands
            the model to ``save_checkpoint``.
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
                f"save_freq must be 'epoch', not {save_freq!r}: metrics are averaged then"
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

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if collectives().hvd.rank() != 0:
            return
        logs = logs or {}
        if self.monitor not in logs:
            raise ValueError(
                f"BestModelCheckpoint monitors {self.monitor!r}, and this epoch has "
                f"{', '.join(logs) or 'no metrics'}"
            )
        value = float(logs[self.monitor])
        if self.best is not None and not self._sign * value > self._sign * self.best:
            return
        self.best = value
        if self.filepath is None:
            steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
            save_checkpoint(self.model, steps, {self.monitor: value, "epoch": epoch + 1})
        else:
            self.model.save(os.fspath(self.filepath).format(epoch=epoch + 1, **logs))
        if self.verbose:
            print(
                f"\nEpoch {epoch + 1}: {self.monitor} is {value:g}, the best: the model is saved."
            )


def _is_built(model: Any) -> bool:
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def _by_rank(counts: list[int]) -> str:
    told = [f"{count} on rank {rank}" for rank, count in enumerate(counts)]
    return ", ".join(told[:8]) + (", ..." if len(told) > 8 else "")
