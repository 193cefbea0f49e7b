"""The messages of the driver to the ranks' tasks; see `messages` for those of the other direction."""

from __future__ import annotations

from typing import Literal

import msgspec

from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.slots import ChannelAddress, Slot

#: What Horovod calls the library that coordinates its CPU collectives.
Controller = Literal["gloo", "mpi"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Welcome(Message, frozen=True):
    """The driver has received the task's Hello. It sends the Assignment when all tasks are up."""


class Detach(Message, frozen=True):
    """Some tasks cannot reach the driver: all tasks switch to detached mode."""


class Assignment(Message, frozen=True):
    """A rank's slot, and how it meets the other ranks.

    Attributes:
        slot: this task's slot only. With all slots, 1000 ranks would receive a million.
        rendezvous: ``host:port/token`` of Horovod's rendezvous server; empty with a single rank.
        master_address, master_port: for torch.distributed.
        pieces: for each DataFrame that came through the barrier job, metadata of each rank's rows,
            in the order of ranks.
        controller: the library with which Horovod coordinates and reduces on CPUs.
        space: the name of the ranks' PMI key-value space; unique to the run.
        mapping: which ranks share a host, in MPICH's format.
        host: the index of the slot's host.
    """

    slot: Slot
    rendezvous: str
    master_address: str
    master_port: int
    pieces: dict[str, list[bytes]] = {}
    controller: Controller = "gloo"
    space: str = ""
    mapping: str = ""
    host: int = 0


class Fetched(Message, frozen=True):
    """A piece of a checkpoint.

    Attributes:
        data: empty at the end of the file.
        problem: why the piece cannot be sent; empty otherwise.
    """

    name: str
    offset: int
    data: bytes = b""
    problem: str = ""


class Fenced(Message, frozen=True):
    """All ranks have reached the PMI barrier."""


class MpiValues(Message, frozen=True):
    """The key-value pairs that all ranks have published so far."""

    values: dict[str, str]


class ShowStacks(Message, frozen=True):
    """Requests the worker's Python stacks. The answer is Stacks."""


class Stop(Message, frozen=True):
    """End the worker now."""

    reason: str


class Taken(Message, frozen=True):
    """The driver has received everything up to Ended."""


class Work(Message, frozen=True):
    """What a task of a pool does in an attempt; see launchers/member.py.

    Attributes:
        task: the task's number in the attempt.
        size: the number of ranks.
        attempt: 1-based number of the launch within the run.
        checkpoints: where checkpoints go, and which ones to resume from.
        address: the attempt's channel.
    """

    task: int
    size: int
    attempt: int
    checkpoints: CheckpointPlan
    address: ChannelAddress


class Change(Message, frozen=True):
    """The number of ranks is to change: those of an attempt leave at their next commit."""

    attempt: int


FromDriver = (
    Welcome
    | Detach
    | Assignment
    | Fetched
    | Fenced
    | MpiValues
    | ShowStacks
    | Stop
    | Taken
    | Work
    | Change
)
