"""What ``main`` may call while it runs as a rank.

`log_to_driver`, `report`, `save_checkpoint`, `load_checkpoint`, `check_sync`, `current_attempt`.
Outside a rank, in a test of ``main`` say, they check their arguments and do what makes sense there.

Imports what it needs here, not at the first call: that may come from a thread while another one
forks, and a fork inside an import never ends. What checkpoints need is too much for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horovod_runner import messages, pipe
from horovod_runner.frames import frame
from horovod_runner.handover import CheckpointPlan
from horovod_runner.reports import Reporter, checked

if TYPE_CHECKING:
    from horovod_runner.saving import LoadedCheckpoint, Saver


@dataclass
class Data:
    """What a rank is told of its datasets.

    Attributes:
        readers: the pickled readers, by the name of the argument.
        pieces: as in messages.Assignment.
    """

    readers: bytes = b""
    pieces: Mapping[str, Sequence[bytes]] = field(default_factory=dict)


@dataclass
class Rank:
    """The rank that this process runs.

    Attributes:
        rank: its number.
        size: how many there are.
        attempt: which attempt of the run this is, from 1 on.
        reporter: sends its reports.
        plan: where checkpoints go and come from.
        bulk: the descriptor that they take to the driver's machine.
        saver: writes them, once there is one.
        check_sync: whether weights are compared.
    """

    rank: int
    size: int
    attempt: int
    reporter: Reporter
    plan: CheckpointPlan
    bulk: int
    saver: Saver | None = None
    check_sync: bool = False

    def finish(self) -> None:
        """Wait until all that ``main`` reported and saved is on its way."""
        self.reporter.finish()
        if self.saver is not None:
            self.saver.close()


data = Data()
_rank: Rank | None = None


def enter(rank: Rank) -> None:
    """Make a rank the one of this process."""
    global _rank  # noqa: PLW0603 - a process runs one rank
    _rank = rank


def log_to_driver(message: str) -> None:
    """Show a line on the driver, whatever ``driver_log_verbosity`` is.

    Comes from HorovodRunner's ``sparkdl.horovod.log_to_driver``; texts of any length arrive whole.
    Outside a worker (the function called directly, in a test say) it prints.

    Args:
        message: the text; anything else is turned into one by ``str``.
    """
    text = str(message)
    way_out = pipe.current()
    if way_out is None:
        print(text)
    else:
        way_out.send(frame(messages.encode(messages.Log(way_out.rank, text))))


def report(*, step: int | None = None, epoch: int | None = None, **metrics: Any) -> None:
    """Tell the driver how the training goes; takes some microseconds and never waits.

        report(loss=loss.item(), lr=0.1, step=step, epoch=epoch)

    The numbers are rows of ``runner.last_run.metrics``, and go to the progress bar and the other
    sinks at once. Rank 0's reports count, or every rank's with ``report_ranks="all"``. Where the
    driver cannot keep up, reports are left out and counted; the latest value of each metric always
    arrives. A metric named ``total_steps`` gives the progress bar its end.

    Args:
        step: how many steps have been done.
        epoch: in which epoch.
        metrics: numbers, or NumPy, torch and TensorFlow scalars. A scalar on a GPU makes this call
            wait for the GPU, as ``loss.item()`` does.

    Raises:
        TypeError: a metric is no number.
        ValueError: a metric has the name of one of the table's own columns.
    """
    if _rank is None:
        checked(metrics, step, epoch)
    else:
        _rank.reporter.report(metrics, step, epoch)


def save_checkpoint(state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
    """Save what the training can go on from.

    Call it on every rank; rank 0 alone writes, and the others return at once. Rank 0 waits while
    the state is copied out of the model; it is written beside the training, and counts once it is
    whole. A checkpoint that cannot be written (the disk is full) is told on the driver, and the
    training goes on.

    Args:
        state: a dict with what ``state_dict()`` gives, tensors, NumPy arrays and plain values; a
            Keras model; bytes; or the path of a folder.
        step: how many steps have been done.
        metrics: numbers by name, by which the best checkpoints are kept (``best``).

    Raises:
        TypeError: the state holds something that cannot be stored; says where.
    """
    if _rank is None or _rank.rank != 0:
        return
    if _rank.saver is None:
        from horovod_runner.saving import Saver

        _rank.saver = Saver(_rank.plan, _rank.bulk)
    _rank.saver.save(state, step, metrics)


def load_checkpoint() -> LoadedCheckpoint | None:
    """What the training is to go on from; None where it starts anew.

    That is the latest complete checkpoint: of ``checkpoint_dir`` with ``resume=True``, or of the
    former attempt (``max_restarts``). Call it on every rank, after ``hvd.init()``: rank 0 reads it
    and hands it to the others, whatever their number was when it was written.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
        RuntimeError: there are several ranks, and ``hvd.init()`` has not been called.
    """
    if _rank is None:
        return None
    from horovod_runner.saving import load

    return load(_rank.plan, _rank.rank, _rank.size, log_to_driver)


def check_sync(model: Any, epoch: int | None = None) -> None:
    """Make sure that all ranks have the same weights; for ``HorovodRunner(check_sync="epoch")``.

    Without that option it returns at once. Call it on every rank, at the end of an epoch; it waits
    for nobody: the driver compares hashes, and where they differ ends the run with a SyncError.
    The callbacks of :mod:`horovod_runner.keras` and :mod:`horovod_runner.lightning` call it.

    Args:
        model: a torch module or a Keras model, of which the trainable weights are compared; or
            tensors, arrays and variables, by name or in a row.
        epoch: which epoch has ended.

    Raises:
        TypeError: there is something else than tensors in it.
    """
    if _rank is None or not _rank.check_sync or _rank.size == 1:
        return
    from horovod_runner.sync import hash_weights

    way_out = pipe.current()
    assert way_out is not None  # noqa: S101 - this is a rank
    weights = hash_weights(model, _rank.rank, epoch)
    way_out.send(frame(messages.encode(weights)))


def current_rank() -> int:
    """The number of this rank, before ``hvd.init()``, too; 0 outside a rank."""
    return 0 if _rank is None else _rank.rank


def current_attempt() -> int:
    """Which attempt of the run this is: 1, and one more after each restart."""
    return 1 if _rank is None else _rank.attempt
