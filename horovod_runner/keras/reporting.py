"""Callbacks that tell the driver how a training goes; they need Keras, and no Horovod.

Also for tf_keras, where TF_USE_LEGACY_KERAS is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from horovod_runner.context import (
    check_sync,
    current_rank,
    load_checkpoint,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.reports import interval

if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
    import tf_keras as keras
else:
    import keras


_restored: list[bool] = []
_checked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows on the driver how ``model.fit`` goes: rank 0's epochs, with their metrics.

    Comes from HorovodRunner's ``sparkdl.horovod.tensorflow.keras.LogCallback``.

    Args:
        per_batch_log: show each batch, too.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log
        self.async_safe = not per_batch_log  # batches in their order, and no wait for any without
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See :class:`keras.callbacks.Callback`; so for all below."""
        self._epoch = epoch
        self._log(f"epoch {epoch + 1}{self._of('epochs')} begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.per_batch_log:
            where = f"epoch {self._epoch + 1}, batch {batch + 1}{self._of('steps')}"
            self._log(f"{where}: {_told(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._log(f"epoch {epoch + 1}{self._of('epochs')} ends: {_told(logs)}")

    def _of(self, what: str) -> str:
        total = (self.params or {}).get(what)
        return f" of {total}" if total else ""

    def _log(self, text: str) -> None:
        if current_rank() == 0:
            log_to_driver(text)


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the metrics of ``model.fit``, saves checkpoints, and goes on from one.

    Put it after MetricAverageCallback, which averages the metrics over the ranks. The numbers are
    rows of ``runner.last_run.metrics`` and move the progress bar; the model is saved at the end of
    each epoch. When ``load_checkpoint`` has something to go on from (``resume=True``, a restart),
    its weights, optimizer state and epoch are taken up before the first batch of a rank's first
    ``fit``: the same call goes on where the former one ended.

    Args:
        every: report after so many batches; 0 reports epochs alone.
        save_every: save after so many epochs; 0 saves nothing.
        restore: whether to go on from a checkpoint.
    """

    async_safe = True  # Keras may call it for a batch while the next one is trained

    def __init__(self, every: int = 10, save_every: int = 1, restore: bool = True) -> None:
        super().__init__()
        self.every = interval("every", every)
        self.save_every = interval("save_every", save_every)
        self.restore = restore
        self._epoch = 0
        self._steps = 0
        self._in_epoch = 0
        self._whole: bool | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """See :class:`keras.callbacks.Callback`; so for all below."""
        if not self.restore or _restored:
            return
        _restored.append(True)
        with keras.saving.custom_object_scope(_own_classes(self.model)):
            loaded = load_checkpoint()
        if loaded is None:
            return
        _take_up(self.model, loaded.state)
        self._steps = loaded.step
        done, epochs = int(loaded.metrics.get("epoch", 0)), self.params.get("epochs")
        # As Keras's own BackupAndRestore does.
        self.model._initial_epoch = done
        if epochs is not None and done >= epochs and current_rank() == 0:
            log_to_driver(
                f"HorovodRunner: nothing is left to train: the checkpoint has {done} epochs, and "
                f"fit was called with epochs={epochs}"
            )

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None  # that was for this fit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._in_epoch = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        self._in_epoch = max(self._in_epoch, batch + 1)
        if self.every and (batch + 1) % self.every == 0:
            known = {"total_steps": steps * epochs} if steps and epochs else {}
            step = self._steps + batch + 1
            report(step=step, epoch=self._epoch + 1, **known, **_numbers(logs))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        check_epoch(self.model, epoch + 1)
        self._steps += self._in_epoch
        report(step=self._steps, epoch=epoch + 1, **_numbers(logs))
        if self.save_every and (epoch + 1) % self.save_every == 0:
            state = self.model if self._is_saved_whole() else _weights(self.model)
            save_checkpoint(state, self._steps, {**_numbers(logs), "epoch": epoch + 1})

    def _is_saved_whole(self) -> bool:
        if self._whole is None:
            self._whole = _can_be_made_anew(self.model)
            if not self._whole and current_rank() == 0:
                log_to_driver(
                    f"HorovodRunner: Keras cannot make a {type(self.model).__name__} from what it "
                    "would save of it (see get_config in Keras's guide to serialization): "
                    "checkpoints hold its weights and its optimizer's state alone"
                )
        return self._whole


def check_epoch(model: Any, epoch: int) -> None:
    """Compare the weights of all ranks, once at the end of an epoch whoever asks for it."""
    if _checked.get(model) != epoch:
        _checked[model] = epoch
        check_sync(model, epoch)


def _own_classes(model: Any) -> dict[str, type]:
    """The classes of a model's layers by name: those of a notebook need not be registered."""
    return {type(layer).__name__: type(layer) for layer in model._flatten_layers()}


def _can_be_made_anew(model: Any) -> bool:
    try:
        with keras.saving.custom_object_scope(_own_classes(model)):
            type(model).from_config(model.get_config())
    except Exception:
        return False
    return True


def _weights(model: Any) -> dict[str, Any]:
    optimizer = model.optimizer
    state = [] if optimizer is None else [_array(each) for each in optimizer.variables]
    return {"weights": model.get_weights(), "optimizer": state}


def _array(variable: Any) -> Any:
    ops = getattr(keras, "ops", None)  # Keras 2 has none
    return variable.numpy() if ops is None else ops.convert_to_numpy(variable)


def _take_up(model: Any, saved: Any) -> None:
    """Give a model the weights and the optimizer state that were saved."""
    if isinstance(saved, keras.Model):
        if not model.built:
            model.build(saved.input_shape)
        saved = _weights(saved)
    if not (isinstance(saved, Mapping) and {"weights", "optimizer"} == set(saved)):
        raise TypeError(
            f"the checkpoint holds a {type(saved).__qualname__}, not a Keras model: it was not "
            "written by ReportCallback. Use ReportCallback(restore=False) and load it in main"
        )
    if not all(layer.built for layer in model._flatten_layers()):
        raise ValueError(
            f"{type(model).__name__} has no weights yet that a checkpoint could be given to: call "
            "it once, model(batch), before fit, or give it an Input layer"
        )
    model.set_weights(saved["weights"])
    optimizer = model.optimizer
    if optimizer is None or not saved["optimizer"]:
        return
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for own, value in zip(optimizer.variables, saved["optimizer"], strict=True):
        own.assign(value)


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        name.replace(" ", "_"): value for name, value in (logs or {}).items() if name != "epoch"
    }


def _told(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={float(value):.4g}" for name, value in (logs or {}).items())
