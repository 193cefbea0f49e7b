"""Keras callbacks that set the learning rate: a schedule by epoch, and a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from horovod_runner.integrations.keras.collectives import collectives


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number that is raised to the power of the epochs
            since ``start_epoch``.
        start_epoch: the first epoch whose learning rate is set.
        end_epoch: the first epoch whose learning rate is no longer set; None sets it to the end.
        staircase: True sets the learning rate once at the beginning of each epoch. False sets it
            before each batch; the epoch is then a fraction.
        momentum_correction: whether the momentum of SGD and RMSprop follows the learning rate
            (Goyal et al., arXiv:1706.02677, 2.2).
        steps_per_epoch: batches per epoch; needed for ``staircase=False`` if Keras does not know.

    Raises:
        ValueError: ``initial_lr`` is None; or in ``fit``: the optimizer has a schedule, or the
            number of batches is unknown.
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
                f"the optimizer has a learning rate schedule ({type(schedule).__name__}), and "
                f"{type(self).__name__} would overwrite it: use only one of them"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} needs the number of batches per epoch, which is "
                    "unknown for this dataset: set steps_per_epoch"
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
        # Keras multiplies gradients by the learning rate before SGD and RMSprop accumulate them.
        if self.momentum_correction and before and now != before and self._optimizer.built:
            of_sgd = getattr(self._optimizer, "momentums", ())
            momentums = of_sgd or getattr(self._optimizer, "_momentums", ())
            scaled = [v for v in momentums if v is not None]
            if getattr(self._optimizer, "momentum", 0) and scaled:
                collectives().scale_variables(scaled, now / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, batch by batch.

    More ranks make a larger global batch, which allows a larger learning rate, but only after some
    epochs (Goyal et al., arXiv:1706.02677).

    Args:
        initial_lr: the learning rate after the warm-up, for example ``0.001 * hvd.size()``.
        warmup_epochs: the number of epochs of the warm-up.
        momentum_correction: as in LearningRateScheduleCallback.
        steps_per_epoch: batches per epoch, if Keras does not know them.
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
            self._warm_up,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def _warm_up(self, epoch: float) -> float:
        size = collectives().hvd.size()
        done = (epoch + 1 / (self.steps_per_epoch or 1)) / (self.end_epoch or 1)
        return float((1 + min(1.0, done) * (size - 1)) / size)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if last and self.verbose and collectives().hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the warm-up ends at {self._learning_rate():g}.")
