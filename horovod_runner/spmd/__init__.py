"""Deep learning inside a program whose ranks already exist, by Bodo's calls.

On every rank::

    from horovod_runner import spmd

    spmd.start("torch")                      # the ranks that have a GPU (else all) join Horovod
    x, y = spmd.prepare_data((x, y))         # the rows of all ranks, on those
    if spmd.initialized():
        import horovod.torch as hvd          # hvd.rank(), hvd.size(): of those that train
        train(x, y)
    spmd.end()                               # the others wait here

Under ``mpirun`` and ``srun`` (with mpi4py), ``horovodrun``, in a Spark barrier task, in a function
that HorovodRunner runs; in a single process all of it works too. Each call is made by every rank.
An exception of one rank that it does not live to tell is raised on the others where they next meet,
in ``end()`` at the latest.

The names are those of ``bodo.dl``, which Bodo had until its 2022 releases.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from horovod_runner import environment, gpu, host, redirect
from horovod_runner.errors import HorovodRunnerError, LaunchError, RankFailedError, is_secondary
from horovod_runner.messages import Assignment
from horovod_runner.spmd import discovery
from horovod_runner.spmd.neighbours import NeighbourFailedError, Neighbours
from horovod_runner.spmd.placement import Interface, Member, Trainer, trainers

if TYPE_CHECKING:
    from horovod_runner.rendezvous import Rendezvous

Framework = Literal["torch", "tensorflow", "keras"]
_CAUSE_SECONDS = 2.0  # a rank that survives may notice before the one that failed has said so

__all__ = [
    "end",
    "initialized",
    "is_cuda_available",
    "prepare_data",
    "rank",
    "size",
    "start",
]


class _Failure(msgspec.Struct, frozen=True):
    """What a rank says of its end."""

    rank: int
    hostname: str
    pid: int
    text: str


@dataclass
class _Session:
    """What is between ``start`` and ``end``."""

    neighbours: Neighbours
    trainers: list[Trainer] = field(default_factory=list)
    own: Trainer | None = None
    horovod: Any = None
    store: Rendezvous | None = None
    environment_before: dict[str, str | None] = field(default_factory=dict)

    @property
    def use_gpus(self) -> bool:
        return self.trainers[0].device is not None


_session: _Session | None = None


def start(framework: Framework, *, ranks_per_host: int | None = None, comm: Any = None) -> None:
    """Choose the ranks that train, give each its GPU, and start Horovod among them.

    Where hosts have GPUs (and the framework is a CUDA build), one rank trains for each GPU; else
    all ranks do. On the ranks that train ``hvd.is_initialized()`` is true and ``hvd.init()`` has
    been called; on the others it is not. The rank's own GPU is the current (torch) or only visible
    (TensorFlow) one.

    Horovod's Gloo does the work between CPUs, under MPI as well; with HOROVOD_CONTROLLER=mpi
    Horovod uses MPI, if it was built with it.

    Args:
        framework: whose Horovod is started.
        ranks_per_host: train on at most so many ranks of each host.
        comm: the mpi4py communicator of the program; None finds out what started it.

    Raises:
        ValueError: the framework is none of these, or ``ranks_per_host`` is below 1.
        RuntimeError: training has been started already, and not ended.
        LaunchError: the ranks cannot find each other, or one of them lacks the framework or its
            Horovod; all ranks raise it.
    """
    global _session  # noqa: PLW0603 - a process takes part in one
    if framework not in get_args(Framework):
        listed = ", ".join(map(repr, get_args(Framework)))
        raise ValueError(f"framework must be one of {listed}, not {framework!r}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be at least 1, not {ranks_per_host}")
    if _session is not None:
        raise RuntimeError("spmd.start() was called before, and spmd.end() was not")
    member = _own_member(framework)
    neighbours = discovery.find(member, comm)
    session = _Session(neighbours)
    try:
        members = _gathered(neighbours, msgspec.structs.replace(member, rank=neighbours.rank))
        session.trainers = trainers(members, ranks_per_host)
        session.own = next((t for t in session.trainers if t.rank == neighbours.rank), None)
        _start_horovod(session, framework)
        # Nobody leaves before all have met: without one of them hvd.init() does not return.
        neighbours.allgather(b"")
    except NeighbourFailedError as error:
        _stop(session, together=False)
        raise _raised(error.failure) from None
    except HorovodRunnerError:  # raised by all
        _stop(session, together=True)
        raise
    except Exception as error:  # of Horovod's own
        _end_failed(session, error)
        raise
    _session = session
    atexit.register(_at_exit)


def prepare_data(data: Any) -> Any:
    """The rows of all ranks, in equal shares on the ranks that train.

    The order of rows is kept: one rank's after another's, and Horovod rank 0 has the first share.
    Shares differ by one row at most, and what has as many rows on each rank is cut alike: ``x`` and
    ``y`` fit, in one call or in two.

    Args:
        data: NumPy arrays (shape ``(rows, ...)``, any dtype), pandas DataFrames and Series, Arrow
            tables, and dicts, tuples and lists of them, of the same kinds on all ranks. A rank
            without rows gives an empty one.

    Returns:
        The same with this rank's share; with no rows where it does not train. Where nothing has
        to move that is what was given, and no copy.

    Raises:
        DataError: what the ranks gave does not fit together; all of them raise it.
        RuntimeError: ``start`` has not been called.
        RankFailedError: another rank has failed.
    """
    session = _started("prepare_data")
    from horovod_runner.spmd.redistribute import redistribute

    try:
        targets = [trainer.rank for trainer in session.trainers]
        return redistribute(data, session.neighbours, targets)
    except NeighbourFailedError as error:
        raise _raised(error.failure) from None


def rank() -> int:
    """The number of this process among all of the program, those that do not train included.

    Raises:
        RuntimeError: ``start`` has not been called.
    """
    return _started("rank").neighbours.rank


def size() -> int:
    """How many processes the program has; ``hvd.size()`` is how many train.

    Raises:
        RuntimeError: ``start`` has not been called.
    """
    return _started("size").neighbours.size


def _started(call: str) -> _Session:
    if _session is None:
        raise RuntimeError(f"spmd.{call}() needs spmd.start() before it")
    return _session


def initialized() -> bool:
    """Whether this rank trains: between ``start`` and ``end``, on the ranks that were chosen."""
    return _session is not None and _session.own is not None


def is_cuda_available() -> bool:
    """Whether the training runs on GPUs; the same on all ranks."""
    return _session is not None and _session.use_gpus


def end() -> None:
    """Wait for all ranks, and stop Horovod; those that do not train leave their cores to others.

    In a ``finally`` it tells the others of the exception that is on its way. A second call, or one
    without ``start``, does nothing.

    Raises:
        RankFailedError: another rank has failed; its traceback is in the text.
    """
    global _session
    session, _session = _session, None
    if session is None:
        return
    atexit.unregister(_at_exit)
    error = sys.exc_info()[1]
    if error is not None and not _is_normal_exit(error):
        _end_failed(session, error)
        return
    together = False
    try:
        session.neighbours.finish()
        together = True
    except NeighbourFailedError as failed:
        raise _raised(failed.failure) from None
    finally:
        _stop(session, together=together)


def _is_normal_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _end_failed(session: _Session, error: BaseException) -> None:
    """End on a rank that has failed itself.

    Raises:
        RankFailedError: it failed because another one had.
    """
    cause = session.neighbours.failure(_CAUSE_SECONDS) if is_secondary(error) else None
    if cause is None and not isinstance(error, RankFailedError):  # of which all were told
        text = "".join(traceback.format_exception(error))
        own = _Failure(session.neighbours.rank, socket.gethostname(), os.getpid(), text.strip())
        session.neighbours.fail(msgspec.msgpack.encode(own))
    _stop(session, together=False)
    if cause is not None:
        raise _raised(cause)


def _at_exit() -> None:
    """This process ends, and has not called ``end``: the others must not wait for it."""
    global _session
    session, _session = _session, None
    if session is None:
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        error = RuntimeError("it exited, by sys.exit or at its end, without a call of spmd.end()")
    try:
        _end_failed(session, error)
    except RankFailedError as first:
        print(f"{first}", file=sys.stderr, flush=True)


def _raised(failure: bytes) -> RankFailedError:
    said = msgspec.msgpack.decode(failure, type=_Failure)
    return RankFailedError(
        f"rank {said.rank} of the program, on {said.hostname}, failed:\n{said.text}",
        rank=said.rank,
        host=said.hostname,
        pid=said.pid,
    )


def _stop(session: _Session, *, together: bool) -> None:
    if session.horovod is not None:
        session.horovod.shutdown()
    if session.store is not None:
        session.store.close()
    for name, value in session.environment_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    session.neighbours.close(together=together)


def _own_member(framework: Framework) -> Member:
    gpus: tuple[str, ...] = ()
    problem = ""
    try:
        seen = gpu.identified_gpus()
        if seen and _is_cuda_build(framework):
            gpus = seen
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Member(
        rank=0,
        host=host.host_id(),
        hostname=socket.gethostname(),
        gpus=gpus,
        interfaces=tuple(Interface(*each) for each in host.interfaces()),
        chosen=os.environ.get("HOROVOD_GLOO_IFACE", ""),
        default=host.default_address(),
        problem=problem,
    )


def _is_cuda_build(framework: Framework) -> bool:
    name = framework
    if framework == "keras":
        import keras

        name = keras.backend.backend()
    if name == "torch":
        import torch

        return torch.version.cuda is not None
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def _gathered(neighbours: Neighbours, own: Any) -> list[Any]:
    """What all ranks say.

    Raises:
        LaunchError: one of them has a problem; all raise it.
    """
    said = [
        msgspec.msgpack.decode(each, type=type(own))
        for each in neighbours.allgather(msgspec.msgpack.encode(own))
    ]
    problems = {each.problem: rank for rank, each in reversed([*enumerate(said)]) if each.problem}
    if problems:
        listed = "; ".join(f"rank {rank}: {problem}" for problem, rank in problems.items())
        raise LaunchError(f"the training cannot start. {listed}")
    return said


class _Ready(msgspec.Struct, frozen=True):
    """That a rank can call ``hvd.init()``.

    Attributes:
        store: the address of the rendezvous store, from the rank that has it.
        use_mpi: whether Horovod is to use MPI here.
    """

    store: str = ""
    use_mpi: bool = False
    problem: str = ""


def _start_horovod(session: _Session, framework: Framework) -> None:
    ready = _Ready()
    try:
        if session.own is not None:
            ready = _prepare(session, session.own, framework)
    except Exception as error:
        ready = _Ready(problem=f"{type(error).__name__}: {error}")
    all_ready: list[_Ready] = _gathered(session.neighbours, ready)
    use_mpi = any(each.use_mpi for each in all_ready)
    comm = None
    if use_mpi:
        comm = session.neighbours.subset([trainer.rank for trainer in session.trainers])
    if session.own is None:
        return
    store = next((each.store for each in all_ready if each.store), "")
    _set_environment(session, _variables(session.own, store, use_mpi=use_mpi))
    # It may have been started for all ranks before, as by a training function of HorovodRunner.
    session.horovod.shutdown()
    session.horovod.init(*([] if comm is None else [comm]))


def _prepare(session: _Session, own: Trainer, framework: Framework) -> _Ready:
    """Load Horovod, pin the GPU, and open the store if it is this rank's to do."""
    redirect.keras_on_import()
    if framework == "keras":
        from horovod_runner.keras.collectives import collectives

        hvd = collectives().hvd
    else:
        hvd = import_module(f"horovod.{framework}")
    session.horovod = hvd
    if own.device is not None:
        for name, pin in (("torch", gpu.pin_torch), ("tensorflow", gpu.pin_tensorflow)):
            if name in sys.modules:
                pin(sys.modules[name], own.device)
    asked = os.environ.get("HOROVOD_CONTROLLER") == "mpi"
    # The MPI of HorovodRunner's ranks starts with all of them, and here some may stay away.
    wants_mpi = (asked and session.neighbours.by_mpi) or not hvd.gloo_built()
    if wants_mpi and not hvd.mpi_built():
        raise LaunchError(
            "HOROVOD_CONTROLLER=mpi, and Horovod was built without MPI: horovod-runner install "
            "--mpi, or leave the variable out to use Gloo."
        )
    store = ""
    if own is session.trainers[0] and own.slot.size > 1 and not wants_mpi:
        from horovod_runner.rendezvous import Rendezvous

        session.store = Rendezvous(own.slot.address, own.slot.size)
        store = session.store.address
    return _Ready(store, wants_mpi)


def _variables(own: Trainer, store: str, *, use_mpi: bool) -> dict[str, str | None]:
    """What ``hvd.init()`` is to find; None where it must find nothing."""
    meeting = dict.fromkeys(("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"))
    if use_mpi:
        return {**meeting, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    assignment = Assignment(own.slot, store, own.slot.address, 0)
    defaults = environment.gloo_variables(own.slot)
    users = {name: os.environ[name] for name in defaults if name in os.environ}
    return {**defaults, **users, **meeting, **environment.horovod_variables(own.slot, assignment)}


def _set_environment(session: _Session, variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        session.environment_before[name] = os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
