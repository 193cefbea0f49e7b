"""Finds what several ranks write, samplers without epochs, and Spark sessions in ranks.

Each function is called with the module that it changes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from horovod_runner.worker import context
from horovod_runner.worker.checks import notes
from horovod_runner.worker.imports.patches import instead_of


def watch_torch_save(module: Any) -> None:
    """Note which files ``torch.serialization`` writes."""

    @instead_of(module, "save")
    def save(plain: Any, obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        _note_file(f)
        return plain(obj, f, *args, **options)


def watch_keras_save(module: Any) -> None:
    """Note which files Keras's module ``saving_api`` writes."""
    for name in ("save_model", "save_weights"):

        @instead_of(module, name)
        def save(plain: Any, model: Any, filepath: Any, *args: Any, **options: Any) -> Any:
            _note_file(filepath)
            return plain(model, filepath, *args, **options)


def watch_torch_logs(module: Any) -> None:
    """Note where the logs of ``torch.utils.tensorboard.writer`` go."""

    @instead_of(module.SummaryWriter, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        _note_folder(self.log_dir)


def watch_keras_logs(module: Any) -> None:
    """Note where the logs of Keras's module ``tensorboard`` go."""

    @instead_of(module.TensorBoard, "set_model")
    def set_model(plain: Any, self: Any, model: Any) -> None:
        plain(self, model)
        _note_folder(self.log_dir)


def watch_keras_csv(module: Any) -> None:
    """Note which files Keras's module ``csv_logger`` writes."""

    @instead_of(module.CSVLogger, "on_train_begin")
    def on_train_begin(plain: Any, self: Any, logs: Any = None) -> None:
        _note_file(self.filename)
        plain(self, logs)


def _note_file(file: Any) -> None:
    if isinstance(file, str | os.PathLike):
        notes.send("file", os.path.abspath(os.fsdecode(file)), once=True)


def _note_folder(folder: str | os.PathLike[str]) -> None:
    path = os.fspath(folder)
    place = path if "://" in path else os.path.abspath(path)
    notes.send("file", f"{place}{os.sep}", once=True)


def watch_sampler(module: Any) -> None:
    """Notice epochs that a sampler of ``torch.utils.data.distributed`` repeats."""

    @instead_of(module.DistributedSampler, "set_epoch")
    def set_epoch(plain: Any, self: Any, epoch: int) -> None:
        self._last_epoch = None  # a look at the first batch may come before it
        plain(self, epoch)

    @instead_of(module.DistributedSampler, "__iter__")
    def begin(plain: Any, self: Any) -> Any:
        # Without gradients it is an evaluation, whose order does not matter.
        if self.shuffle and sys.modules["torch"].is_grad_enabled():
            if getattr(self, "_last_epoch", None) == self.epoch:
                notes.mistake(
                    "sampler",
                    f"a DistributedSampler begins epoch {self.epoch} for the second time, with the "
                    "same order of rows. Call sampler.set_epoch(epoch) at the beginning of each "
                    "epoch.",
                )
            self._last_epoch = self.epoch
        return plain(self)


def watch_spark(module: Any) -> None:
    """Notice a Spark session that a rank starts; called with the module of SparkContext."""

    @instead_of(module.SparkContext, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        if context.current() is not None:
            notes.mistake(
                "spark",
                "main starts a Spark session in the process of a rank. It is not the driver's: it "
                "knows neither its tables nor its executors, and each rank has one of its own. "
                "Use Spark before run, and pass the DataFrame: run(main, train=df).",
            )
        plain(self, *args, **options)
