"""Savers as ranks have them, without a task and a driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.saver import Saver
from horovod_runner.host.folders.folder import Folder
from horovod_runner.wire import messages
from horovod_runner.wire.job_file import CheckpointPlan


@contextmanager
def saving(plan: CheckpointPlan) -> Iterator[tuple[Saver, list[messages.FromRank]]]:
    """A rank's saver, and a list of what it has told the driver: filled at the end of the block."""
    read, write = os.pipe()
    saver, told = Saver(plan, write), list[messages.FromRank]()
    try:
        yield saver, told
    finally:
        saver.close()
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told += messages.decode_batch(pipe.read())


@contextmanager
def saving_to(folder: Folder) -> Iterator[Saver]:
    """A saver of the run "run1", whose driver sees the folder."""
    checkpoint.write_probe(folder, "run1")
    with saving(CheckpointPlan(folder.url, "run1")) as (saver, _):
        yield saver
