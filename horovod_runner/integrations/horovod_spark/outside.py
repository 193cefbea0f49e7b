"""The training of an estimator, as a backend of the user's own runs it.

Such a backend starts processes that this package knows nothing of. This file takes the place of
a rank's context there: Horovod's number of the rank, the rows from the store, checkpoints straight
into the store.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from horovod_runner.data.read.readers import Deferred, Reader
from horovod_runner.data.shard import Shard
from horovod_runner.host.gpus import pin_torch
from horovod_runner.integrations.horovod_spark import names
from horovod_runner.integrations.training.training import Training
from horovod_runner.run.import_hooks import IMPORT_HOOKS
from horovod_runner.wire import events
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.worker import context
from horovod_runner.worker.context import RankContext
from horovod_runner.worker.imports import hooks
from horovod_runner.worker.pipe import Pipe
from horovod_runner.worker.reporter import Reporter

_PLACE: Final = ("HOROVOD_RANK", "HOROVOD_SIZE")


@dataclass(frozen=True)
class OutsideFunction:
    """Trains in a process that another launcher started."""

    # The training, as Training.for_ranks returns it. It may refer to modules of the user's that
    # import horovod.spark, so it is unpickled after the names are there.
    pickled: bytes
    readers: Mapping[str, Reader | Deferred]  # of the rows, by "train" and "valid"
    library: str  # the module of Horovod that the training uses
    checkpoints: CheckpointPlan | None  # where they go; None saves nothing
    use_gpu: bool

    def __call__(self) -> Any:
        """Train on this rank."""
        names.install_where_missing()
        hooks.install(IMPORT_HOOKS)
        hvd: Any = import_module(self.library)
        hvd.init()
        torch = sys.modules.get("torch")
        if self.use_gpu and torch is not None and torch.cuda.is_available():
            pin_torch(torch, hvd.local_rank() % torch.cuda.device_count())
        with _rank(int(hvd.rank()), int(hvd.size()), self.checkpoints):
            training: Training = pickle.loads(self.pickled)  # noqa: S301 - from our own driver
            shards = {name: Shard(name, reader) for name, reader in self.readers.items()}
            return training.train(shards["train"], shards.get("valid"))


@contextmanager
def _rank(rank: int, size: int, checkpoints: CheckpointPlan | None) -> Iterator[None]:
    """Make this process a rank, while a training function runs."""
    before = {name: os.environ.get(name) for name in _PLACE}
    os.environ.update(zip(_PLACE, (str(rank), str(size)), strict=True))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    reporting = sys.modules.get("horovod_runner.integrations.keras.reporting")
    if reporting is not None:  # a backend may run several trainings in one process
        reporting.forget_restored()
    this = RankContext(
        rank=rank,
        size=size,
        attempt=1,
        pipe=_Printing(nowhere, nowhere),
        reporter=Reporter(rank, nowhere, wanted=False),
        checkpoints=checkpoints or CheckpointPlan("", ""),
        file_parts=nowhere,
    )
    context.enter(this)
    try:
        yield
    finally:
        this.finish()
        context.enter(None)
        os.close(nowhere)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class _Printing(Pipe):
    """Prints what a rank tells its driver, where there is none."""

    def send(self, message: events.Message) -> None:
        """Print a line of ``log_to_driver``; drop everything else."""
        if isinstance(message, events.Log):
            print(message.text)
