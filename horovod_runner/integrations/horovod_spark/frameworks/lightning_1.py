"""What code for Lightning 1 expects: hooks that Lightning 2 has dropped, a saver, and a logger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from horovod_runner.host.scratch import temporary_folder
from horovod_runner.integrations.horovod_spark.store import copy_to_store
from horovod_runner.integrations.lightning import framework
from horovod_runner.integrations.training.torch_loop import weights_of
from horovod_runner.worker.api import current_rank

_EPOCH_ENDS: Final = ("training_epoch_end", "validation_epoch_end")


@contextmanager
def saver_of(callbacks: Sequence[Any]) -> Iterator[Any]:
    """The user's ModelCheckpoint, writing into a temporary folder; None if there is none."""
    saver = next(
        (each for each in callbacks if isinstance(each, framework.callbacks.ModelCheckpoint)), None
    )
    with temporary_folder("lightning") as folder:
        if saver is not None:
            saver.dirpath = saver.dirpath or folder
        yield saver


@contextmanager
def logger(logs: str | None) -> Iterator[Any]:
    """A logger, which some callbacks require: TensorBoard's if rank 0 has a folder for it."""
    if logs is None or current_rank() or not find_spec("tensorboard"):
        yield framework.loggers.logger.DummyLogger()
        return
    with temporary_folder("lightning") as folder:
        yield framework.loggers.TensorBoardLogger(folder, name=None, version="")
        copy_to_store(Path(folder), logs)


def weights_in(path: str, model: Any) -> bytes:
    """The weights in a checkpoint of Lightning's callback, of a module."""
    state = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
    model.load_state_dict(state)
    return weights_of(model)


def with_old_hooks(model: Any) -> Any:
    """A module whose hooks of Lightning 1 are called by OldHooks, and not refused by Lightning."""
    kind = type(model)
    old = [name for name in _EPOCH_ENDS if callable(getattr(kind, name, None))]
    if not old:
        return model

    def keeping(step: str, name: str) -> Any:
        original = getattr(kind, step)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if result is not None:
                kept = {"loss": result} if torch.is_tensor(result) and "train" in name else result
                self.__dict__.setdefault(f"_old_{name}", []).append(kept)
            return result

        return wrapped

    changed: dict[str, Any] = {}
    for name in old:
        step = name.replace("_epoch_end", "_step")
        changed[name] = None  # Lightning 2 refuses modules that have it
        changed[f"_call_{name}"] = getattr(kind, name)
        changed[step] = keeping(step, name)
    model.__class__ = type(kind.__name__, (kind,), {**changed, "__module__": kind.__module__})
    return model


class OldHooks(framework.Callback):  # type: ignore[misc]
    """Calls the hooks of Lightning 1 that modules and callbacks of the user's still have."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """As in Lightning's Callback."""
        self._end(trainer, pl_module, "training_epoch_end")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """As in Lightning's Callback."""
        self._end(trainer, pl_module, "validation_epoch_end")

    def _end(self, trainer: Any, module: Any, name: str) -> None:
        outputs = module.__dict__.pop(f"_old_{name}", [])
        hook = getattr(module, f"_call_{name}", None)
        if hook is not None:
            hook(outputs)
        for callback in self._callbacks:
            end = getattr(callback, "on_epoch_end", None)
            if end is not None:
                end(trainer, module)
