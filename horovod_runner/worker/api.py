"""The functions that `main` may call while it runs as a rank.

Outside a rank, for instance in a test of ``main``, they check their arguments and do no more than
makes sense there.

Imports are at the top of this file and not in the functions: a function may be called in a thread
while another thread forks, and a fork in the middle of an import hangs for ever. The exception is
what checkpoints and weight checks need: it would slow down the start of every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_runner.common.numbers import check_report, check_saved, plain_int
from horovod_runner.errors import RanksChangedError
from horovod_runner.wire import events, job_file
from horovod_runner.worker import context
from horovod_runner.worker.profiling.clock import clock

if TYPE_CHECKING:
    from horovod_runner.checkpoints.commits import Commits
    from horovod_runner.checkpoints.loader import LoadedCheckpoint

STATES = "horovod_elastic"  # the key of commits of Horovod's states


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
        rank.pipe.send(events.Log(rank.rank, text))


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


def save_checkpoint(
    state: Any, step: int, metrics: Mapping[str, Any] | None = None, *, sharded: bool = False
) -> None:
    """Save a checkpoint that the training can resume from.

    Call it on every rank; only rank 0 writes, and the call returns at once elsewhere. Rank 0 waits
    while the state is copied out of the model. The file is written while the training continues,
    and the checkpoint counts once it is complete. If it cannot be written (the disk is full), the
    driver shows a notice, and the training continues.

    With ``sharded=True`` each rank writes its part of the state: its shards of tensors (FSDP's
    DTensor), and a share of what all ranks have. Plain tensors and values must be the same on all
    ranks. All ranks must see the folder, ``checkpoint_dir``.

    Args:
        state: a dict of what ``state_dict()`` returns, tensors, NumPy arrays and plain values; a
            Keras model; bytes; or the path of a folder. With ``sharded=True`` a dict, best made by
            ``torch.distributed.checkpoint.state_dict.get_state_dict``.
        step: how many steps are done.
        metrics: numbers by name. ``CheckpointConfig(metric=...)`` keeps the best checkpoints by one
            of them.
        sharded: whether each rank writes its part, in the format of torch.distributed.checkpoint.

    Raises:
        CheckpointError: ``sharded=True``, and a rank does not see the folder of checkpoints, or the
            ranks call this with different steps. Nothing is written.
        RanksChangedError: an elastic run goes on with other ranks, and resumes from this
            checkpoint. Raised on rank 0, once the checkpoint is written. Do not catch it.
        RuntimeError: ``sharded=True``, and ``hvd.init()`` has not been called.
        TypeError: the state holds something that cannot be stored; says where.
        ValueError: ``step`` is below 0.
    """
    rank = context.current()
    if rank is None:
        return
    rank.saved += 1
    if rank.rank != 0 and not sharded:
        return
    if rank.saver is None:
        from horovod_runner.checkpoints.saver import Saver

        rank.saver = Saver(rank.checkpoints, rank.file_parts, rank.outcome_file, rank.limits)
    with clock.timing("checkpoint"):
        if sharded:
            rank.saver.save_sharded(
                state, step, metrics, calls=rank.saved, rank=rank.rank, size=rank.size
            )
        else:
            rank.saver.save(state, step, metrics)
        if rank.rank == 0 and _leaving(rank):
            # The others do not know whether it is written: they end when they notice this end.
            rank.saver.finish()
            raise _ranks_changed("checkpoint", step)


def commit(state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
    """Keep the state in the memory of each host, in an elastic run (``np=(2, 8)``).

    It costs one copy of the state and no disk, so it may be called every few steps. If ranks or
    hosts are lost, or come, ``main`` is called again, and ``load_checkpoint`` returns the latest
    commit. It survives the loss of all ranks, and of any host but the last one. It does not survive
    the run: use ``save_checkpoint`` as well, less often.

    Call it on every rank, with a state that is the same on all ranks. One rank of each host writes,
    and the call returns at once elsewhere. A host needs memory for two copies of the state. In a
    run with a fixed number of ranks (``np=4``), and outside a run, the call checks ``step`` and
    ``metrics`` and keeps nothing: ``np=(4, 4)`` is a fixed number of ranks with commits.

    Args:
        state: as for ``save_checkpoint``. Of sharded parameters (FSDP), commit the gathered state.
        step: how many steps are done.
        metrics: numbers by name, which ``load_checkpoint`` returns.

    Raises:
        CheckpointError: the host's memory has no room; says which setting to change.
        RanksChangedError: the run goes on with other ranks, and resumes from this commit. Do not
            catch it.
        TypeError: the state holds something that cannot be stored; says where.
        ValueError: ``step`` is below 0.
    """
    rank = context.current()
    step, numbers = check_saved(step, metrics)
    commits = None if rank is None else _host_commits(rank)
    if rank is None or commits is None:
        return
    from horovod_runner.checkpoints.commits import Commit

    rank.committed += 1
    if rank.local_rank == 0:
        with clock.timing("checkpoint"):
            following = rank.checkpoints.next_number + rank.saved
            commits.write(state, Commit(rank.attempt, rank.committed, step, following, numbers))
        _note_imports(rank)
    if _leaving(rank):
        kept = commits.latest()
        # A rank that does not write must not end before the one that does has written.
        if kept is not None and kept.order >= (rank.attempt, rank.committed):
            raise _ranks_changed("commit", step)


def _host_commits(rank: context.RankContext) -> Commits | None:
    """The commits of this host; None in a run without commits."""
    if rank.host_commits is None and rank.commits:
        from horovod_runner.checkpoints.commits import Commits

        rank.host_commits = Commits(rank.commits)
    return rank.host_commits


def _leaving(rank: context.RankContext) -> bool:
    """Whether the driver wants the ranks of this attempt to end at a commit."""
    return bool(rank.commits) and os.path.exists(job_file.leave_file(rank.commits, rank.attempt))


def _ranks_changed(kept: str, step: int) -> RanksChangedError:
    return RanksChangedError(
        f"the run goes on with another number of ranks: main ends here, and is called again on all "
        f"ranks. load_checkpoint then returns the {kept} of step {step}, or a later one."
    )


def _note_imports(rank: context.RankContext) -> None:
    """Tell the task which frameworks to preload for a restart; once."""
    path = Path(job_file.imported_file(rank.commits))
    if rank.committed == 1 and rank.imports is not None and not path.exists():
        part = path.with_suffix(".part")
        with suppress(OSError):  # the memory is full: a restart imports for itself
            part.write_text(json.dumps(rank.imports.preloadable(quiet=True)))
            part.replace(path)


def load_checkpoint(
    into: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
) -> LoadedCheckpoint | None:
    """Load the checkpoint that the training resumes from; None starts from the beginning.

    That is the latest complete checkpoint: of ``checkpoint_dir`` with ``resume=True``, or of the
    previous attempt (``max_restarts``). Call it on every rank, after ``hvd.init()``: rank 0 reads
    it and broadcasts it. Of a sharded checkpoint each rank reads what it needs. The number of ranks
    may differ from when it was written.

    In an elastic run it is the latest ``commit`` of any host, unless a checkpoint is newer. Commits
    of Horovod's ``hvd.elastic`` states do not count: ``hvd.elastic.run`` restores them.

    Args:
        into: a state like the one that was saved, or a function that returns it, which is called
            only if there is a checkpoint. Its tensors, which may be sharded, are overwritten in
            place, and its other values are replaced. It may leave out keys. It works with every
            checkpoint of a dict, sharded or not. None: the state is a new one, of whole tensors on
            the CPU.

    Raises:
        CheckpointError: there are checkpoints, none of them is complete, and there is no commit; or
            ``into`` has keys or shapes that the checkpoint lacks.
        RuntimeError: there are several ranks, and ``hvd.init()`` has not been called.
        TypeError: ``into`` is neither a dict nor a function that returns one.
    """
    # A model can be called, too, but only a resumed training would do that.
    is_model = hasattr(into, "state_dict") or hasattr(into, "trainable_variables")
    if into is not None and (is_model or not (callable(into) or isinstance(into, Mapping))):
        raise _no_state("into", into)
    rank = context.current()
    if rank is None:
        return None

    @cache
    def target() -> dict[str, Any]:
        state = into() if callable(into) else into
        if not isinstance(state, Mapping):
            raise _no_state("what the function into returns", state)
        return state

    wanted = None if into is None else target
    loaded = _load(rank, rank.checkpoints, _host_commits(rank), wanted)
    if loaded is not None and isinstance(loaded.state, dict) and STATES in loaded.state:
        # hvd.elastic.run restores the commit itself.
        loaded = _load(rank, rank.checkpoints, None, wanted)
    if loaded is not None and into is not None and loaded.state is not target():
        from horovod_runner.checkpoints.sharded import reader

        reader.fill(target(), loaded.state, loaded.step)
        loaded = replace(loaded, state=target())
    rank.resumed = loaded is not None
    return loaded


def _no_state(what: str, given: Any) -> TypeError:
    return TypeError(
        f"{what} must be a dict, got {type(given).__name__}: load_checkpoint loads into a dict. "
        "Give one, such as {'model': model.state_dict()}, or a function that returns it"
    )


def load_commit() -> LoadedCheckpoint | None:
    """Load the latest commit of any host, also if a checkpoint is newer; None if there is none.

    Call it on every rank, after ``hvd.init()``.
    """
    rank = context.current()
    if rank is None or not rank.commits:
        return None
    return _load(rank, rank.checkpoints._replace(resume=()), _host_commits(rank))


def is_leaving() -> bool:
    """Whether the ranks of this attempt are to end at a commit, because their number changes."""
    rank = context.current()
    return rank is not None and _leaving(rank)


def _load(
    rank: context.RankContext,
    checkpoints: job_file.CheckpointPlan,
    commits: Commits | None,
    into: Callable[[], dict[str, Any]] | None = None,
) -> LoadedCheckpoint | None:
    from horovod_runner.checkpoints.loader import load

    return load(
        checkpoints,
        rank.rank,
        rank.size,
        log_to_driver,
        commits=commits,
        keeps=rank.local_rank == 0,
        into=into,
    )


def check_weights(model: Any, epoch: int | None = None) -> None:
    """Verify that all ranks have the same weights, with ``DebugConfig(weight_check="epoch")``.

    Call it on every rank at the end of an epoch; without that option it returns at once. It never
    waits for other ranks: the driver compares hashes, and ends the run with a SyncError if they
    differ. The callbacks of :mod:`horovod_runner.keras`, :mod:`horovod_runner.lightning` and
    :mod:`horovod_runner.huggingface` call it. Weights that are divided among the ranks (FSDP,
    DeepSpeed's ZeRO 3) are not compared.

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
    from horovod_runner.worker.weights import hash_weights, is_sharded

    if not is_sharded(model):
        rank.pipe.send(hash_weights(model, rank.rank, epoch))


def current_rank() -> int:
    """The number of this rank, also before ``hvd.init()``; 0 outside a rank."""
    rank = context.current()
    return 0 if rank is None else rank.rank


def current_attempt() -> int:
    """The number of this launch within the run: 1, and one more after each restart."""
    rank = context.current()
    return 1 if rank is None else rank.attempt
