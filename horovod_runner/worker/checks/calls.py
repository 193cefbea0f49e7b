"""Finds what several ranks write, samplers without epochs, and Spark sessions in ranks."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from horovod_runner.worker import context
from horovod_runner.worker.checks import notes


def watch_torch_save(module: Any) -> None:
    """Note which files are written; called with the module ``torch.serialization``."""
    module.save = _noting(module.save)


def watch_keras_save(module: Any) -> None:
    """Note which files are written; called with Keras's module ``saving_api``."""
    module.save_model = _noting(module.save_model)
    module.save_weights = _noting(module.save_weights)


def _noting(save: Any) -> Any:
    """Wrap a function whose second argument, ``f`` or ``filepath``, is the path of a file."""

    @functools.wraps(save)
    def call(*args: Any, **options: Any) -> Any:
        file = args[1] if len(args) > 1 else options.get("f", options.get("filepath"))
        if isinstance(file, str | os.PathLike):
            notes.send("file", os.path.abspath(os.fsdecode(file)), once=True)
        return save(*args, **options)

    return call


def watch_torch_logs(module: Any) -> None:
    """Note where logs go; called with the module ``torch.utils.tensorboard.writer``."""
    plain = module.SummaryWriter.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        _note_folder(self.log_dir)

    module.SummaryWriter.__init__ = init


def watch_keras_logs(module: Any) -> None:
    """Note where logs go; called with Keras's module ``tensorboard``."""
    plain = module.TensorBoard.set_model

    def set_model(self: Any, model: Any) -> None:
        plain(self, model)
        _note_folder(self.log_dir)

    module.TensorBoard.set_model = set_model


def watch_keras_csv(module: Any) -> None:
    """Note which files are written; called with Keras's module ``csv_logger``."""
    plain = module.CSVLogger.on_train_begin

    def on_train_begin(self: Any, logs: Any = None) -> None:
        notes.send("file", os.path.abspath(self.filename), once=True)
        plain(self, logs)

    module.CSVLogger.on_train_begin = on_train_begin


def _note_folder(folder: str | os.PathLike[str]) -> None:
    path = os.fspath(folder)
    place = path if "://" in path else os.path.abspath(path)
    notes.send("file", f"{place}{os.sep}", once=True)


def watch_mlflow(module: Any) -> None:
    """Notice runs of ranks other than 0; called with the module ``mlflow.tracking.fluent``."""
    plain = module.start_run

    @functools.wraps(plain)
    def start_run(run_id: str | None = None, *args: Any, **options: Any) -> Any:
        rank = context.current()
        joins = run_id or os.environ.get("MLFLOW_RUN_ID") or options.get("parent_run_id")
        if not (joins or options.get("nested")) and rank is not None and rank.rank > 0:
            notes.send(
                "mistake",
                "mlflow",
                "main starts a run of MLflow on every rank, so MLflow shows as many runs as there "
                "are ranks. Log on one rank, under `if hvd.rank() == 0:`; or call report on every "
                "rank, and give HorovodRunner sinks=[MLflowSink()].",
                once=True,
            )
        return plain(run_id, *args, **options)

    module.start_run = start_run


def watch_sampler(module: Any) -> None:
    """Notice repeated epochs; called with the module ``torch.utils.data.distributed``."""
    plain = module.DistributedSampler.__iter__
    plain_set = module.DistributedSampler.set_epoch

    def set_epoch(self: Any, epoch: int) -> None:
        self._last_epoch = None  # a look at the first batch may come before it
        plain_set(self, epoch)

    def begin(self: Any) -> Any:
        # Without gradients it is an evaluation, whose order does not matter.
        if self.shuffle and sys.modules["torch"].is_grad_enabled():
            if getattr(self, "_last_epoch", None) == self.epoch:
                notes.send(
                    "mistake",
                    "sampler",
                    f"a DistributedSampler begins epoch {self.epoch} for the second time, with the "
                    "same order of rows. Call sampler.set_epoch(epoch) at the beginning of each "
                    "epoch.",
                    once=True,
                )
            self._last_epoch = self.epoch
        return plain(self)

    module.DistributedSampler.set_epoch = set_epoch
    module.DistributedSampler.__iter__ = begin


def watch_spark(module: Any) -> None:
    """Notice a Spark session that a rank starts; called with the module of SparkContext."""
    plain = module.SparkContext.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **options: Any) -> None:
        if context.current() is not None:
            notes.send(
                "mistake",
                "spark",
                "main starts a Spark session in the process of a rank. It is not the driver's: it "
                "knows neither its tables nor its executors, and each rank has one of its own. "
                "Use Spark before run, and pass the DataFrame: run(main, train=df).",
                once=True,
            )
        plain(self, *args, **options)

    module.SparkContext.__init__ = init
