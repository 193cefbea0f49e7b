"""The state of a training between ``spmd.start`` and ``spmd.end``, and how it ends."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from horovod_runner.errors import LaunchError, RankFailedError, is_secondary
from horovod_runner.spmd.peers import Failure, Peers
from horovod_runner.spmd.trainers import Trainer
from horovod_runner.wire import messages
from horovod_runner.worker import context
from horovod_runner.worker import old_keras as notes

if TYPE_CHECKING:
    from horovod_runner.worker.startup.rendezvous import Rendezvous

Framework = Literal["torch", "tensorflow", "keras"]
# A rank that survives a failure may notice it before the rank that failed has reported the cause.
_CAUSE_SECONDS = 2.0


class _Answer(Protocol):
    @property
    def problem(self) -> str:
        """Why the rank cannot take part; empty if it can."""


_Value = TypeVar("_Value", bound=_Answer)


@dataclass
class Session:
    """A training between ``start`` and ``end``.

    Attributes:
        peers: all ranks of the program.
        trainers: the ranks that train.
        trainer: this rank's entry in ``trainers``; None if it does not train.
        handled: the exception that the program was handling when it called ``start``, if any.
        horovod: the Horovod module that was started here; None if none was.
        rendezvous: the rendezvous server that this rank opened; None on all other ranks.
        environment_before: the earlier values of changed environment variables; None for a variable
            that was not set.
    """

    peers: Peers
    trainers: list[Trainer] = field(default_factory=list)
    trainer: Trainer | None = None
    handled: BaseException | None = None
    horovod: Any = None
    rendezvous: Rendezvous | None = None
    environment_before: dict[str, str | None] = field(default_factory=dict)

    @property
    def use_gpus(self) -> bool:
        """Whether the training runs on GPUs."""
        return self.trainers[0].device is not None

    def gather(self, value: _Value, decode: Callable[[bytes], _Value]) -> list[_Value]:
        """Exchange a msgspec struct; returns those of all ranks.

        Raises:
            LaunchError: a rank has a problem. All ranks raise it.
        """
        gathered = self.peers.allgather(msgspec.msgpack.encode(value))
        values = [decode(data) for data in gathered]
        # Each problem with the first rank that has it.
        problems = {v.problem: rank for rank, v in reversed([*enumerate(values)]) if v.problem}
        if problems:
            listed = "; ".join(f"rank {rank}: {problem}" for problem, rank in problems.items())
            raise LaunchError(f"the training cannot start. {listed}")
        return values

    def set_environment(self, variables: Mapping[str, str | None]) -> None:
        """Set environment variables until :meth:`close`; None removes a variable."""
        for name, value in variables.items():
            self.environment_before[name] = os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def fail(self, error: BaseException) -> None:
        """End the session on a rank that has failed, and tell the other ranks.

        Raises:
            RankFailedError: this rank failed only because another one had.
        """
        cause = self.peers.failure(_CAUSE_SECONDS) if is_secondary(error) else None
        if cause is None and not isinstance(error, RankFailedError):  # all ranks know of that one
            _add_note(error)
            text = "".join(traceback.format_exception(error)).strip()
            failure = Failure(self.peers.rank, socket.gethostname(), os.getpid(), text)
            self.peers.fail(messages.encode(failure))
        self.close(together=False)
        if cause is not None:
            raise cause

    def close(self, *, together: bool) -> None:
        """Stop Horovod, restore the environment, and disconnect; ``together``: see Peers.close."""
        if self.horovod is not None:
            self.horovod.shutdown()
        if self.rendezvous is not None:
            self.rendezvous.close()
        for name, value in self.environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.peers.close(together=together)


def _add_note(error: BaseException) -> None:
    """Say what to do if the program was written for Keras 2 or TensorFlow 1."""
    if context.current() is None:  # otherwise the rank adds it
        with suppress(Exception):  # the error itself matters more
            notes.add_note(error, notes.BY_PROGRAM)
