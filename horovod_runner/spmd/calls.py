"""The public calls of ``horovod_runner.spmd``: start, prepare_data, end and queries."""

from __future__ import annotations

import atexit
import sys
from typing import Any, get_args

import msgspec

from horovod_runner.errors import HorovodRunnerError, RankFailedError
from horovod_runner.spmd import discovery
from horovod_runner.spmd.horovod_start import start_horovod
from horovod_runner.spmd.session import Framework, Session
from horovod_runner.spmd.trainers import choose_trainers, decode_participant

_session: Session | None = None


def start(framework: Framework, *, ranks_per_host: int | None = None, comm: Any = None) -> None:
    """Choose the ranks that train, assign their GPUs, and start Horovod on them.

    Call it on every rank of the program::

        from horovod_runner import spmd

        spmd.start("torch")
        x, y = spmd.prepare_data((x, y))     # moves the rows of all ranks to those that train
        if spmd.initialized():
            import horovod.torch as hvd      # hvd.rank() and hvd.size() count ranks that train

            train(x, y)
        spmd.end()                           # ranks that do not train wait here

    It works under ``mpirun`` and ``srun`` (with mpi4py), under ``horovodrun``, in a Spark barrier
    task, in a function that HorovodRunner runs, and in a single process. If the hosts have GPUs and
    the framework is a CUDA build, one rank trains for each GPU. Otherwise all ranks train. On ranks
    that train, ``hvd.init()`` has been called, and the rank's GPU is the current device (torch) or
    the only visible one (TensorFlow).

    Horovod reduces on CPUs with Gloo, also under MPI. With HOROVOD_CONTROLLER=mpi it uses MPI, if
    it was built with MPI.

    An exception on one rank is raised on the others at their next call, at the latest in ``end()``.

    Args:
        framework: "torch", "tensorflow" or "keras": the framework whose Horovod is started.
        ranks_per_host: the maximum number of ranks that train on each host; None sets no limit.
        comm: the program's mpi4py communicator; None detects what started the program.

    Raises:
        ValueError: ``framework`` is unknown, or ``ranks_per_host`` is below 1.
        RuntimeError: ``start`` was called before without an ``end``.
        LaunchError: the ranks cannot reach each other, or a rank lacks the framework or its
            Horovod. All ranks raise it.
    """
    global _session  # noqa: PLW0603 - a process takes part in one training at a time
    if framework not in get_args(Framework):
        listed = ", ".join(map(repr, get_args(Framework)))
        raise ValueError(f"framework must be one of {listed}, not {framework!r}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be at least 1, not {ranks_per_host}")
    if _session is not None:
        raise RuntimeError("spmd.start() was called before: call spmd.end() first")
    participant = discovery.describe_this_rank(framework)
    session = Session(discovery.find(participant, comm), handled=sys.exception())
    rank = session.peers.rank
    try:
        participants = session.gather(
            msgspec.structs.replace(participant, rank=rank), decode_participant
        )
        session.trainers = choose_trainers(participants, ranks_per_host)
        session.trainer = next((t for t in session.trainers if t.rank == rank), None)
        start_horovod(session, framework)
        # No rank may leave before all have met: hvd.init() returns only when all have called it.
        session.peers.allgather(b"")
    except RankFailedError:
        session.close(together=False)
        raise
    except HorovodRunnerError:  # raised on all ranks
        session.close(together=True)
        raise
    except Exception as error:  # raised by Horovod
        session.fail(error)
        raise
    _session = session
    atexit.register(_at_exit)


def prepare_data(data: Any) -> Any:
    """Move the rows of all ranks to the ranks that train, in equal shares.

    Rows keep their order: rank by rank, and Horovod rank 0 gets the first share. Shares differ by
    at most one row. Arrays with matching row counts are split identically, in one call or in
    several, so rows of ``x`` and ``y`` stay together.

    Args:
        data: NumPy arrays (shape ``(rows, ...)``, any dtype), pandas DataFrames and Series, Arrow
            tables and record batches, or dicts, tuples and lists of these. All ranks pass the same
            structure; a rank without rows passes empty arrays or tables.

    Returns:
        The same structure with this rank's share; with zero rows on ranks that do not train. Data
        that need not move are returned as they are, not copied.

    Raises:
        DataError: the data of the ranks do not fit together. All ranks raise it.
        RuntimeError: ``start`` has not been called.
        RankFailedError: another rank has failed.
    """
    session = _started("prepare_data")
    from horovod_runner.spmd.redistribute import redistribute

    targets = [trainer.rank for trainer in session.trainers]
    return redistribute(data, session.peers, targets)


def rank() -> int:
    """Return this process's number among all processes of the program, from 0.

    Raises:
        RuntimeError: ``start`` has not been called.
    """
    return _started("rank").peers.rank


def size() -> int:
    """Return the number of processes of the program; ``hvd.size()`` is how many of them train.

    Raises:
        RuntimeError: ``start`` has not been called.
    """
    return _started("size").peers.size


def initialized() -> bool:
    """Whether this rank trains: true between ``start`` and ``end`` on the chosen ranks."""
    return _session is not None and _session.trainer is not None


def is_cuda_available() -> bool:
    """Whether the training runs on GPUs; the same on all ranks."""
    return _session is not None and _session.use_gpus


def end() -> None:
    """Wait for all ranks, and stop Horovod. Waiting ranks use almost no CPU.

    In a ``finally`` block it also tells the other ranks about the exception that is being raised. A
    second call, or a call without ``start``, does nothing.

    Raises:
        RankFailedError: another rank has failed; the text contains its traceback.
    """
    global _session
    session, _session = _session, None
    if session is None:
        return
    atexit.unregister(_at_exit)
    error = sys.exception()
    is_normal_exit = isinstance(error, SystemExit) and error.code in (None, 0)
    if error is not None and error is not session.handled and not is_normal_exit:
        session.fail(error)
        return
    together = False
    try:
        session.peers.finish()
        together = True
    finally:
        session.close(together=together)


def _started(call: str) -> Session:
    if _session is None:
        raise RuntimeError(f"spmd.{call}() requires spmd.start() first")
    return _session


def _at_exit() -> None:
    """Tell the other ranks that this process exits without ``end``: they must not wait for it."""
    global _session
    session, _session = _session, None
    if session is not None:
        tell_of_exit(session, getattr(sys, "last_value", None))


def tell_of_exit(session: Session, error: BaseException | None) -> None:
    """Tell the other ranks why this process exits, and print what they know of it."""
    if error is None:
        error = RuntimeError("the process exited (sys.exit, or the end of main) before spmd.end()")
    shown = len(getattr(error, "__notes__", ()))  # with the traceback, which Python has printed
    try:
        session.fail(error)
    except RankFailedError as first:
        print(f"{first}", file=sys.stderr, flush=True)
    for note in getattr(error, "__notes__", ())[shown:]:
        print(note, file=sys.stderr, flush=True)
