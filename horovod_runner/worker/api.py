"""The functions that `main` may call while it runs as a rank.

`log_to_driver`, `report`, `save_checkpoint`, `load_checkpoint`, `check_weights`, `current_attempt`.
Outside a rank, for instance in a test of ``main``, they check their arguments and do no more than
makes sense there.

Imports are at the top of this file and not in the functions: a function may be called in a thread
while another thread forks, and a fork in the middle of an import hangs for ever. The exception is
what checkpoints and weight checks need: it would slow down the start of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horovod_runner.common.numbers import check_report, plain_int
from horovod_runner.profiling.clock import clock
from horovod_runner.wire import messages
from horovod_runner.worker import context

if TYPE_CHECKING:
    from horovod_runner.checkpoints.loader import LoadedCheckpoint


def log_to_driver(message: str) -> None:
    """Show a line on the driver, with any ``driver_log_verbosity``.

    Databricks' ``sparkdl.horovod.log_to_driver``, without its limit on the length. Outside a rank
    it prints.

    Args:
        message: the text; anything else is converted by ``str``.
    """
    text = str(message)
    rank = context.current()
    if rank is None:
        print(text)
    else:
        rank.pipe.send(messages.Log(rank.rank, text))


def report(
    *,
    step: int | None = None,
    epoch: int | None = None,
    total_steps: int | None = None,
    **metrics: Any,
) -> None:
    """Report metrics to the driver; takes some microseconds and never waits.

        report(loss=loss.item(), lr=0.1, step=step, epoch=epoch)

    The numbers become rows of ``runner.last_run.metrics``, and are passed to the progress bar and
    the other sinks at once. Only rank 0's reports count, or every rank's with
    ``report_ranks="all"``. If the driver cannot keep up, reports are dropped and counted; the
    latest value of each metric always arrives.

    Args:
        step: how many steps are done.
        epoch: the current epoch.
        total_steps: the number of steps of the whole training, which is the end of the progress
            bar. None leaves it as it is.
        metrics: numbers, or NumPy, torch and TensorFlow scalars. With a scalar on a GPU this call
            waits for the GPU, as ``loss.item()`` does.

    Raises:
        TypeError: a metric is not a number, or a step or an epoch is not a whole number.
        ValueError: a metric is named like a column that every report has.
    """
    rank = context.current()
    if rank is not None:
        with clock.timing("report"):
            rank.reporter.report(metrics, step, epoch, total_steps)
        clock.count_report()
        return
    check_report(metrics, step, epoch)
    if total_steps is not None:
        plain_int("total_steps", total_steps)


def save_checkpoint(state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
    """Save a checkpoint that the training can resume from.

    Call it on every rank; only rank 0 writes, and the call returns at once elsewhere. Rank 0 waits
    while the state is copied out of the model. The file is written while the training continues,
    and the checkpoint counts once it is complete. If it cannot be written (the disk is full), the
    driver shows a notice, and the training continues.

    Args:
        state: a dict of what ``state_dict()`` returns, tensors, NumPy arrays and plain values; a
            Keras model; bytes; or the path of a folder.
        step: how many steps are done.
        metrics: numbers by name. ``CheckpointConfig(metric=...)`` keeps the best checkpoints by one
            of them.

    Raises:
        TypeError: the state holds something that cannot be stored; says where.
        ValueError: ``step`` is below 0.
    """
    rank = context.current()
    if rank is None or rank.rank != 0:
        return
    if rank.saver is None:
        from horovod_runner.checkpoints.saver import Saver

        rank.saver = Saver(rank.checkpoints, rank.file_parts)
    with clock.timing("checkpoint"):
        rank.saver.save(state, step, metrics)


def load_checkpoint() -> LoadedCheckpoint | None:
    """Load the checkpoint that the training resumes from; None starts from the beginning.

    That is the latest complete checkpoint: of ``checkpoint_dir`` with ``resume=True``, or of the
    previous attempt (``max_restarts``). Call it on every rank, after ``hvd.init()``: rank 0 reads
    it and broadcasts it. The number of ranks may differ from when it was written.

    Raises:
        CheckpointError: there are checkpoints, and none of them is complete.
        RuntimeError: there are several ranks, and ``hvd.init()`` has not been called.
    """
    rank = context.current()
    if rank is None:
        return None
    from horovod_runner.checkpoints.loader import load

    return load(rank.checkpoints, rank.rank, rank.size, log_to_driver)


def check_weights(model: Any, epoch: int | None = None) -> None:
    """Verify that all ranks have the same weights, with ``DebugConfig(weight_check="epoch")``.

    Call it on every rank at the end of an epoch; without that option it returns at once. It never
    waits for other ranks: the driver compares hashes, and ends the run with a SyncError if they
    differ. The callbacks of :mod:`horovod_runner.keras` and :mod:`horovod_runner.lightning` call
    it.

    Args:
        model: a torch module or a Keras model, whose trainable weights are compared; or tensors,
            arrays and variables, in a dict or a list.
        epoch: the epoch that has ended.

    Raises:
        TypeError: ``model`` holds something that is not a tensor.
    """
    rank = context.current()
    if rank is None or not rank.weight_check or rank.size == 1:
        return
    from horovod_runner.worker.weights import hash_weights

    rank.pipe.send(hash_weights(model, rank.rank, epoch))


def current_rank() -> int:
    """The number of this rank, also before ``hvd.init()``; 0 outside a rank."""
    rank = context.current()
    return 0 if rank is None else rank.rank


def current_attempt() -> int:
    """The number of this launch within the run: 1, and one more after each restart."""
    rank = context.current()
    return 1 if rank is None else rank.attempt
