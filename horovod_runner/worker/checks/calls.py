"""Finds files that several ranks write, samplers without epochs, and Spark sessions in ranks."""

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
    """Wrap a function whose second argument is the path of a file."""

    @functools.wraps(save)
    def call(saved: Any, file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            notes.send("file", os.path.abspath(file), once=True)
        return save(saved, file, *args, **options)

    return call


def watch_sampler(module: Any) -> None:
    """Notice repeated epochs; called with the module ``torch.utils.data.distributed``."""
    plain = module.DistributedSampler.__iter__

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
