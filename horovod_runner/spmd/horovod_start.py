"""Starts Horovod on the ranks that train: GPU, rendezvous server, environment, ``hvd.init()``."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Final

import msgspec

from horovod_runner.errors import LaunchError
from horovod_runner.host.gpus import pin_tensorflow, pin_torch
from horovod_runner.run.import_hooks import IMPORT_HOOKS
from horovod_runner.spmd.session import Framework, Session
from horovod_runner.spmd.trainers import Trainer
from horovod_runner.wire.messages import Assignment
from horovod_runner.worker.imports import hooks
from horovod_runner.worker.startup import rank_environment


class _Ready(msgspec.Struct, frozen=True):
    """A rank's answer whether it can call ``hvd.init()``.

    Attributes:
        rendezvous: the rendezvous server's address, from the rank that opened it; otherwise empty.
        use_mpi: whether Horovod is to use MPI here.
        problem: why the rank cannot start Horovod; empty if it can.
    """

    rendezvous: str = ""
    use_mpi: bool = False
    problem: str = ""


_decode_ready: Final = msgspec.msgpack.Decoder(_Ready).decode


def start_horovod(session: Session, framework: Framework) -> None:
    """Start Horovod on the ranks that train; every rank of the program calls this.

    Raises:
        LaunchError: a rank cannot start Horovod. All ranks raise it.
    """
    ready = _Ready()
    try:
        if session.trainer is not None:
            ready = _prepare(session, session.trainer, framework)
    except Exception as error:
        ready = _Ready(problem=f"{type(error).__name__}: {error}")
    answers = session.gather(ready, _decode_ready)
    use_mpi = any(answer.use_mpi for answer in answers)
    comm = None
    if use_mpi:
        comm = session.peers.subset([trainer.rank for trainer in session.trainers])
    if session.trainer is None:
        return
    rendezvous = next((answer.rendezvous for answer in answers if answer.rendezvous), "")
    session.set_environment(_variables(session.trainer, rendezvous, use_mpi=use_mpi))
    # Horovod may already run on all ranks, for example in a training function of HorovodRunner.
    session.horovod.shutdown()
    session.horovod.init(*([] if comm is None else [comm]))


def _prepare(session: Session, trainer: Trainer, framework: Framework) -> _Ready:
    """Import Horovod, pin the GPU, and open the rendezvous server on the first rank that trains."""
    hooks.install(IMPORT_HOOKS)
    if framework == "keras":
        from horovod_runner.integrations.keras.collectives import collectives

        hvd = collectives().hvd
    else:
        hvd = import_module(f"horovod.{framework}")
    session.horovod = hvd
    if trainer.device is not None:
        for name, pin in (("torch", pin_torch), ("tensorflow", pin_tensorflow)):
            if name in sys.modules:
                pin(sys.modules[name], trainer.device)
    requested = os.environ.get("HOROVOD_CONTROLLER") == "mpi"
    # HorovodRunner also sets the variable, but its MPI needs all ranks, and here some do not train.
    use_mpi = (requested and session.peers.by_mpi) or not hvd.gloo_built()
    if use_mpi and not hvd.mpi_built():
        raise LaunchError(
            "HOROVOD_CONTROLLER=mpi is set, but Horovod was built without MPI. Build it with MPI, "
            "horovod-runner install --mpi, or unset the variable to use Gloo."
        )
    rendezvous = ""
    if trainer is session.trainers[0] and trainer.slot.size > 1 and not use_mpi:
        from horovod_runner.worker.startup.rendezvous import Rendezvous

        session.rendezvous = Rendezvous(trainer.slot.address, trainer.slot.size)
        rendezvous = session.rendezvous.address
    return _Ready(rendezvous, use_mpi)


def _variables(trainer: Trainer, rendezvous: str, *, use_mpi: bool) -> dict[str, str | None]:
    """Return the environment that ``hvd.init()`` needs; None for a variable that must be unset."""
    unset = dict.fromkeys(("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"))
    if use_mpi:
        return {**unset, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    assignment = Assignment(trainer.slot, rendezvous, trainer.slot.address, 0)
    defaults = rank_environment.gloo_variables(trainer.slot)
    set_by_user = {name: os.environ[name] for name in defaults if name in os.environ}
    return {
        **defaults,
        **set_by_user,
        **unset,
        **rank_environment.horovod_variables(trainer.slot, assignment),
    }
