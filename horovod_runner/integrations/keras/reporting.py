"""Keras callbacks that report to the driver, log to it, and save checkpoints; without Horovod.

They also work with tf_keras, if TF_USE_LEGACY_KERAS is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from horovod_runner.common.numbers import RESERVED, check_interval
from horovod_runner.data.scoring.models.keras import inputs_of
from horovod_runner.worker.api import (
    check_weights,
    current_rank,
    load_checkpoint,
    log_to_driver,
    report,
    save_checkpoint,
)

if TYPE_CHECKING:
    from horovod_runner.checkpoints.loader import LoadedCheckpoint

if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
    import tf_keras as keras
else:
    import keras


_restored: list[bool] = []  # not empty once a fit of this process has looked for a checkpoint
_compared_epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the latest, by model


def forget_restored() -> None:
    """Let the next ``fit`` of this process resume from a checkpoint again."""
    _restored.clear()


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows the epochs of rank 0's ``model.fit`` on the driver, with their metrics.

    The same as ``LogCallback`` in Databricks' ``sparkdl.horovod.tensorflow.keras``.

    Args:
        per_batch_log: whether to show each batch as well.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log
        # True lets Keras train the next batch before the callback has seen this one.
        self.async_safe = not per_batch_log
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._log(f"epoch {epoch + 1}{self._of_total('epochs')} begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.per_batch_log:
            where = f"epoch {self._epoch + 1}, batch {batch + 1}{self._of_total('steps')}"
            self._log(f"{where}: {_metrics_text(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._log(f"epoch {epoch + 1}{self._of_total('epochs')} ends: {_metrics_text(logs)}")

    def _of_total(self, param: str) -> str:
        total = (self.params or {}).get(param)
        return f" of {total}" if total else ""

    def _log(self, text: str) -> None:
        if current_rank() == 0:
            log_to_driver(text)


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the metrics of ``model.fit``, saves checkpoints, and resumes from them.

    With MetricAverageCallback, at any place in the list, the metrics are those of all ranks. They
    become rows of ``runner.last_run.metrics`` and move the progress bar. The model is saved at the
    end of each epoch. After a restart, or with ``resume=True``, the first ``fit`` of a rank
    restores the weights, the optimizer's state and the epoch of the latest checkpoint before its
    first batch.

    Args:
        every: report after this many batches; 0 reports only at the end of an epoch.
        save_every: save after this many epochs; 0 saves nothing.
        restore: whether to resume from a checkpoint.

    Raises:
        ValueError: ``every`` or ``save_every`` is not a whole number from 0 on.
    """

    async_safe = True  # Keras may call it for a batch while it trains the next one

    def __init__(self, every: int = 10, save_every: int = 1, restore: bool = True) -> None:
        super().__init__()
        self.every = check_interval("every", every)
        self.save_every = check_interval("save_every", save_every)
        self.restore = restore
        self._epoch = 0
        self._steps = 0  # of all finished epochs
        self._in_epoch = 0  # batches of the current epoch
        self._saves_model: bool | None = None
        self._resumes_at = 0  # the first epoch of a fit that resumes
        self._loaded: LoadedCheckpoint | None = None  # by load, for the next fit

    def load(self, model: Any) -> LoadedCheckpoint | None:
        """Load what the next ``fit`` of a model resumes from; ``fit`` does it otherwise."""
        if not self.restore or _restored:
            return None
        _restored.append(True)
        with keras.saving.custom_object_scope(_layer_classes(model)):
            self._loaded = load_checkpoint()
        return self._loaded

    def on_train_begin(self, logs: Any = None) -> None:
        loaded = self._loaded or self.load(self.model)
        if loaded is None:
            return
        self._loaded = None
        when_built(self.model, lambda: _restore(self.model, loaded.state))
        self._steps = loaded.step
        done, epochs = int(loaded.metrics.get("epoch", 0)), self.params.get("epochs")
        # Keras's BackupAndRestore does the same.
        self.model._initial_epoch = self._resumes_at = done
        if epochs is not None and done >= epochs and current_rank() == 0:
            log_to_driver(
                f"HorovodRunner: fit(epochs={epochs}) trains nothing: the checkpoint already has "
                f"{done} epochs. Set a higher number of epochs to train on"
            )

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None  # only this fit resumes

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        expected, self._resumes_at = self._resumes_at, 0
        if expected and epoch != expected:
            raise RuntimeError(
                f"fit began with epoch {epoch + 1}, and the checkpoint has {expected} epochs: this "
                f"version of horovod_runner cannot resume a fit of Keras {keras.__version__}. "
                "Change one of them. Or pass restore=False, load the checkpoint yourself, and call "
                f"fit(initial_epoch={expected})"
            )
        self._epoch, self._in_epoch = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        self._in_epoch = max(self._in_epoch, batch + 1)
        if self.every and (batch + 1) % self.every == 0:
            total = steps * epochs if steps and epochs else None
            step = self._steps + batch + 1
            report(step=step, epoch=self._epoch + 1, total_steps=total, **_numbers(logs))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        check_epoch(self.model, epoch + 1)
        self._steps += self._in_epoch
        report(step=self._steps, epoch=epoch + 1, **_numbers(logs))
        if self.save_every and (epoch + 1) % self.save_every == 0:
            state = self.model if self._can_save_model() else _weights(self.model)
            save_checkpoint(state, self._steps, {**_numbers(logs), "epoch": epoch + 1})

    def _can_save_model(self) -> bool:
        if self._saves_model is None:
            self._saves_model = _can_be_recreated(self.model)
            if not self._saves_model and current_rank() == 0:
                log_to_driver(
                    f"HorovodRunner: Keras cannot recreate the model {type(self.model).__name__} "
                    "from its config, so checkpoints contain only the weights and the optimizer's "
                    "state. To save whole models, add get_config (see Keras's guide to "
                    "serialization)"
                )
        return self._saves_model


def is_built(model: Any) -> bool:
    """Whether a model has all its weights."""
    # A model that begins with its inputs is built as a whole; layers for text may say otherwise.
    if model.built and inputs_of(model):
        return True
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def when_built(model: Any, action: Callable[[], None]) -> None:
    """Act on a model with weights: now, or at the first batch, if only that tells their shapes.

    On TensorFlow that is a model without an Input layer. Call it in ``on_train_begin``.
    """
    if is_built(model):
        action()
        return
    train = model.train_function

    def first(iterator: Any) -> Any:
        model.train_function = train
        # If only a real batch can build the model, act after that batch, as Horovod does.
        with suppress(Exception):
            model._symbolic_build(data_batch=iterator.element_spec)
        if is_built(model):
            action()
            return train(iterator)
        logs = train(iterator)
        action()
        return logs

    model.train_function = first


def check_epoch(model: Any, epoch: int) -> None:
    """Compare the ranks' weights at the end of an epoch, once even if several callbacks ask."""
    if _compared_epochs.get(model) != epoch:
        _compared_epochs[model] = epoch
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if not hasattr(optimizer, "shared_variables"):
            check_weights(model, epoch)
        elif shared := optimizer.shared_variables(model.trainable_variables):
            check_weights(shared, epoch)


def _layer_classes(model: Any) -> dict[str, type]:
    """The classes of a model's layers by name: custom classes need no registration."""
    return {type(layer).__name__: type(layer) for layer in model._flatten_layers()}


def _can_be_recreated(model: Any) -> bool:
    try:
        with keras.saving.custom_object_scope(_layer_classes(model)):
            type(model).from_config(model.get_config())
    except Exception:
        return False
    return True


def _weights(model: Any) -> dict[str, Any]:
    optimizer = model.optimizer
    state = [] if optimizer is None else [_array(variable) for variable in optimizer.variables]
    return {"weights": model.get_weights(), "optimizer": state}


def _array(variable: Any) -> Any:
    ops = getattr(keras, "ops", None)  # None on Keras 2
    return variable.numpy() if ops is None else ops.convert_to_numpy(variable)


def _restore(model: Any, saved: Any) -> None:
    """Set a model's weights and its optimizer's state to a Keras model's, or to `_weights`."""
    if isinstance(saved, keras.Model):
        if not model.built:
            model.build(saved.input_shape)
        saved = _weights(saved)
    if not (isinstance(saved, Mapping) and {"weights", "optimizer"} == set(saved)):
        raise TypeError(
            f"the checkpoint must contain a Keras model, got {type(saved).__qualname__}: it was "
            "not written by ReportCallback. Use ReportCallback(restore=False) and load it in main"
        )
    if not is_built(model):
        raise ValueError(
            f"{type(model).__name__} has no weights yet, so a checkpoint cannot be restored: call "
            "the model once, model(batch), before fit, or add an Input layer"
        )
    model.set_weights(saved["weights"])
    optimizer = model.optimizer
    if optimizer is None or not saved["optimizer"]:
        return
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, saved["optimizer"], strict=True):
        variable.assign(value)


def is_number(value: Any) -> bool:
    """Whether a metric of Keras's is one number, and no array as of ``F1Score(average=None)``."""
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metrics that ``report`` takes."""
    named = {name.replace(" ", "_"): value for name, value in (logs or {}).items()}
    return {
        name: value for name, value in named.items() if is_number(value) and name not in RESERVED
    }


def _metrics_text(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={_metric_text(value)}" for name, value in (logs or {}).items())


def _metric_text(value: Any) -> str:
    if is_number(value):
        return f"{float(value):.4g}"
    return " ".join(str(value).split())
