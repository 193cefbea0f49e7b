"""What crosses the channel, typed: a message that does not fit its type is not decoded.

On the wire each message is MessagePack with its type's name in front; nothing is ever unpickled
from here.

    rank to driver: Hello, Started, Began, Output, Log, Report, FilePart, Saved, Unsaved, Fetch,
                    Weights, Fence, Lookup, Alive, Stalled, Stacks, Failed, Ended
    driver to rank: Welcome, Apart, Assignment, Fetched, Fenced, Found, ShowStacks, Stop, Taken
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from horovod_runner.frames import unframe
from horovod_runner.marker import Marker
from horovod_runner.topology import Offer, Slot

#: Horovod's own word for it.
Controller = Literal["gloo", "mpi"]
ControllerChoice = Literal["auto", "gloo", "mpi"]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """A task is up and says where it is.

    Attributes:
        rendezvous: ``host:port/token`` of the rendezvous store, from task 0 alone.
        master_port: the port held for torch.distributed's store, from task 0 alone.
        software: the versions of what has to fit the driver's and the other hosts'.
        pieces: of each DataFrame that came through the barrier job, what there is to tell of the
            rows that this task has.
    """

    offer: Offer
    rendezvous: str = ""
    master_port: int = 0
    software: dict[str, str] = {}
    pieces: dict[str, bytes] = {}


class Started(Message, frozen=True):
    """The worker of a rank runs.

    Attributes:
        cold: why that was no warm start, where one was asked for.
    """

    rank: int
    pid: int
    cold: str = ""


class Began(Message, frozen=True):
    """``main`` is called on a rank now."""

    rank: int


class Output(Message, frozen=True):
    """A piece of what a rank printed: whole lines, but for the last piece and for size 1."""

    rank: int
    stream: Literal["stdout", "stderr"]
    text: str


class Log(Message, frozen=True):
    """A text that ``log_to_driver`` was called with."""

    rank: int
    text: str


class Report(Message, frozen=True, gc=False):
    """What ``report`` was called with.

    Attributes:
        metrics: numbers by name; NaN and infinity among them.
        time: when, in seconds since the epoch, by the clock of the rank's host.
        left_out: how many reports of this rank before this one found no room and were left out.
    """

    rank: int
    metrics: Mapping[str, int | float]
    step: _Int64 | None = None
    epoch: _Int64 | None = None
    time: float = 0.0
    left_out: int = 0


class FilePart(Message, frozen=True):
    """A piece of a file on its way to the driver's machine, from its start to its end.

    Attributes:
        name: of a checkpoint, or "timeline".
        offset: where the piece begins, in bytes.
    """

    rank: int
    name: str
    offset: int
    data: bytes


class Saved(Message, frozen=True):
    """A checkpoint is complete: in its folder, or as the file parts before this message."""

    rank: int
    marker: Marker


class Unsaved(Message, frozen=True):
    """A checkpoint could not be written; the ones before it are unharmed."""

    rank: int
    step: int
    reason: str


class Fetch(Message, frozen=True):
    """Asks for a piece of a checkpoint that the driver alone sees; Fetched answers."""

    rank: int
    name: str
    offset: int


class Weights(Message, frozen=True):
    """What ``check_sync`` was called with.

    Attributes:
        names: of the variables; empty but for rank 0, which all are compared with.
        digests: of their values, in the same order.
        epoch: after which epoch.
    """

    rank: int
    names: list[str]
    digests: list[bytes]
    epoch: _Int64 | None = None


class Fence(Message, frozen=True):
    """A rank's MPI waits until all have come so far; Fenced answers.

    Attributes:
        values: what it gives the others, by name.
    """

    rank: int
    values: dict[str, str] = {}


class Lookup(Message, frozen=True):
    """Asks for what all ranks gave; Found answers."""

    rank: int


class Alive(Message, frozen=True):
    """Sent every second: a task of which nothing is heard is lost.

    Attributes:
        quiet: for how many seconds the worker has printed and reported nothing.
        idle: for how many of them it has not computed either.
        frozen: the worker is stopped (SIGSTOP, a debugger).
    """

    quiet: float = 0.0
    idle: float = 0.0
    frozen: bool = False


class Stall(msgspec.Struct, frozen=True):
    """A tensor that some ranks have handed to a collective and others have not.

    Attributes:
        tensor: Horovod's name for it, its operation in front: "allreduce.grad.fc1".
        missing: the ranks that it waits for.
    """

    tensor: str
    missing: tuple[int, ...]


class Stalled(Message, frozen=True):
    """What Horovod's stall inspector found; it says so again while it lasts."""

    stalls: list[Stall]


class Stacks(Message, frozen=True):
    """A rank's Python stacks, as faulthandler writes them; empty where it gave no answer."""

    text: str


class Failed(Message, frozen=True):
    """A rank ended badly; sent at once, while its result still travels through the launcher.

    Attributes:
        exit_code: the worker's exit code, negative for a signal.
        error_type: the exception's type, empty when the worker died without one.
        secondary: the error says only that another rank went away.
    """

    rank: int
    exit_code: int
    error_type: str = ""
    secondary: bool = False


class Ended(Message, frozen=True):
    """A rank's last message: nothing follows.

    Attributes:
        sent: how many messages it sent before this one.
    """

    task: int
    sent: int


class Welcome(Message, frozen=True):
    """The driver has heard the task and will answer when all are there."""


class Apart(Message, frozen=True):
    """Some tasks cannot reach the driver: do without it, all of you."""


class Assignment(Message, frozen=True):
    """A rank's slot, and what it needs to meet the others.

    Attributes:
        slot: the task's own: a thousand ranks that were told of each other would be a million.
        pieces: of each DataFrame that came through the barrier job, what there is to tell of each
            rank's rows, in the order of ranks.
        controller: what Horovod negotiates and reduces on CPUs with.
        space: the name that the ranks' MPI takes for theirs; no other run has it.
        mapping: which ranks share a host, in the words of MPICH.
        host: the number of the slot's host among all.
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
        problem: why it cannot be had; empty otherwise.
    """

    name: str
    offset: int
    data: bytes = b""
    problem: str = ""


class Fenced(Message, frozen=True):
    """All ranks have come to the fence."""


class Found(Message, frozen=True):
    """What all ranks gave at the fences so far."""

    values: dict[str, str]


class ShowStacks(Message, frozen=True):
    """Answer with Stacks."""


class Stop(Message, frozen=True):
    """End the worker now."""

    reason: str


class Taken(Message, frozen=True):
    """The driver has taken everything up to Ended."""


FromRank = (
    Hello
    | Started
    | Began
    | Output
    | Log
    | Report
    | FilePart
    | Saved
    | Unsaved
    | Fetch
    | Weights
    | Fence
    | Lookup
    | Alive
    | Stalled
    | Stacks
    | Failed
    | Ended
)
FromDriver = Welcome | Apart | Assignment | Fetched | Fenced | Found | ShowStacks | Stop | Taken

_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)
_T = TypeVar("_T")


encode: Final[Callable[[Message], bytes]] = _encoder.encode
"""The message's bytes."""


def decode_from_rank(data: bytes) -> FromRank:
    """Raises :class:`msgspec.DecodeError` for anything but a rank's message."""
    return _decode(_from_rank, data)


def decode_batch(batch: bytes) -> list[FromRank]:
    """A batch of frames; raises as :func:`decode_from_rank` and :func:`unframe` do."""
    decode = _from_rank.decode
    try:
        return [decode(data) for data in unframe(batch)]
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def decode_from_driver(data: bytes) -> FromDriver:
    """Raises :class:`msgspec.DecodeError` for anything but a driver's message."""
    return _decode(_from_driver, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except RecursionError as error:  # lists in lists in lists, where nothing was asked for
        raise msgspec.DecodeError("nested too deeply") from error
