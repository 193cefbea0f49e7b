"""The typed messages of the channel. A message that does not fit its type is not decoded.

On the wire a message is MessagePack, with the name of its type first. Nothing is unpickled here.
What a rank tells its user is in `events`, what it measures of itself in `measurements`, and what a
pool of tasks says in `pool`. `FromRank` and `FromDriver` list who sends what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from horovod_runner.common.slots import Controller, Offer, Slot
from horovod_runner.common.text import encodable
from horovod_runner.wire import events, measurements, pool
from horovod_runner.wire.events import Int64, Message
from horovod_runner.wire.framing import Batch, unframe

#: The trace of a framework's profiler; every rank may send one.
TraceName = Literal["torch.json.gz", "tensorflow.zip"]
TRACE_NAMES: Final[tuple[TraceName, ...]] = get_args(TraceName)
MOST_TRACE_BYTES: Final = 64 << 20


class Hello(Message, frozen=True):
    """A task has started, and describes its host.

    Attributes:
        rendezvous: ``host:port/token`` of Horovod's rendezvous server; empty except from task 0.
        master_port: a port held free for torch.distributed's TCPStore; 0 except from task 0.
        software: versions of packages, which must fit the driver's and those of the other hosts.
        pieces: for each DataFrame that came through the barrier job, metadata of this task's rows.
    """

    offer: Offer
    rendezvous: str = ""
    master_port: int = 0
    software: dict[str, str] = {}
    pieces: dict[str, bytes] = {}


class Started(Message, frozen=True):
    """The worker of a rank is running.

    Attributes:
        cold: why it was not forked from a fork server; empty if it was, or without such a server.
    """

    rank: int
    pid: int
    cold: str = ""


class Unshown(Message, frozen=True):
    """A rank has printed something for the first time, and the driver does not show it."""

    rank: int


class FilePart(Message, frozen=True):
    """A piece of a file that is copied to the driver's machine. Pieces arrive in order.

    Attributes:
        name: a checkpoint's file name, "timeline", or a TraceName.
        offset: where the piece begins, in bytes.
        data: empty after the last piece of a trace.
    """

    rank: int
    name: str
    offset: int
    data: bytes


class Fetch(Message, frozen=True):
    """Requests a piece of a checkpoint that only the driver can read. The answer is Fetched."""

    rank: int
    name: str
    offset: int


class Weights(Message, frozen=True):
    """Digests of a rank's weights, for ``check_weights``. All ranks are compared with rank 0.

    Attributes:
        names: of the variables; empty except from rank 0.
        digests: of their values, in the same order.
        epoch: the epoch that has just ended; None if the call named none.
    """

    rank: int
    names: list[str]
    digests: list[bytes]
    epoch: Int64 | None = None


class Fence(Message, frozen=True):
    """A rank's MPI has reached a PMI barrier. The answer, once all ranks have, is Fenced.

    Attributes:
        values: the key-value pairs that it publishes to the other ranks.
    """

    rank: int
    values: dict[str, str] = {}


class Lookup(Message, frozen=True):
    """Requests the key-value pairs that all ranks published. The answer is MpiValues."""

    rank: int


class Alive(Message, frozen=True):
    """A heartbeat, sent every second. A task that sends nothing counts as lost.

    Attributes:
        quiet: seconds since the worker last printed or reported something.
        idle: the part of ``quiet`` in which the worker did not compute either, in seconds.
        frozen: the worker is stopped (SIGSTOP, or a debugger).
    """

    quiet: float = 0.0
    idle: float = 0.0
    frozen: bool = False


class Stall(msgspec.Struct, frozen=True):
    """A collective that some ranks have entered and others have not.

    Attributes:
        tensor: Horovod's name for the tensor, after its operation: "allreduce.grad.fc1".
        missing: the ranks that have not entered.
    """

    tensor: str
    missing: tuple[int, ...]


class Stalled(Message, frozen=True):
    """Stalled collectives that Horovod's stall inspector printed; repeated while they last."""

    stalls: list[Stall]


class Stacks(Message, frozen=True):
    """A rank's Python stacks, as faulthandler writes them; empty if the worker did not answer."""

    text: str


class Failed(Message, frozen=True):
    """A rank failed. Sent at once; its result arrives later, through the launcher.

    Attributes:
        exit_code: the worker's exit code, negative for a signal.
        error_type: the exception's type; empty if the worker died without one.
        secondary: the error only says that another rank went away.
    """

    rank: int
    exit_code: int
    error_type: str = ""
    secondary: bool = False


class Ended(Message, frozen=True):
    """A rank's last message.

    Attributes:
        sent: how many batches it sent before this one.
    """

    task: int
    sent: int


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
        hide_gpus: whether the rank sees none of the host's GPUs.
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
    hide_gpus: bool = False


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
    """End the worker; if it is writing a checkpoint, within some seconds."""

    reason: str
    seconds: float = 0.0


class Taken(Message, frozen=True):
    """The driver has received everything up to Ended."""


#: What a rank tells its user: see `events`.
RankEvent = (
    events.Began
    | events.Output
    | events.Log
    | events.Report
    | events.Saved
    | events.Unsaved
    | events.Untraced
    | measurements.Profile
    | measurements.Machine
    | measurements.Lines
)
FromRank = (
    Hello
    | Started
    | Unshown
    | RankEvent
    | measurements.Waits
    | measurements.MemoryShort
    | measurements.Note
    | FilePart
    | Fetch
    | Weights
    | Fence
    | Lookup
    | Alive
    | Stalled
    | Stacks
    | Failed
    | Ended
    | pool.Joined
    | pool.Done
)
_Orders = Detach | Assignment | ShowStacks | Stop | pool.Work | pool.Change
FromDriver = Welcome | Fetched | Fenced | MpiValues | Taken | _Orders


def is_trace(message: Message) -> bool:
    """Whether a message is a piece of a trace, which every rank may send."""
    return isinstance(message, FilePart) and message.name in TRACE_NAMES


def encoder(hook: Callable[[Any], Any] | None = None) -> Callable[[Any], bytes]:
    """Return a function that encodes values as MessagePack, and escapes what UTF-8 lacks.

    These are bytes of file names in another encoding. ``hook`` is msgspec's, for other types.
    """
    plain = msgspec.msgpack.Encoder(enc_hook=hook).encode

    def encode(value: Any) -> bytes:
        try:
            return plain(value)
        except UnicodeEncodeError:
            found = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=hook)
            return plain(_escaped(found))

    return encode


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return encodable(value)
        case list() | tuple():
            return [_escaped(each) for each in value]
        case dict():
            return {_escaped(key): _escaped(each) for key, each in value.items()}
    return value


encode: Final[Callable[[msgspec.Struct], bytes]] = encoder()
"""Encode a message, or an outcome, as bytes."""

_from_rank: Final = msgspec.msgpack.Decoder[FromRank](FromRank).decode
_from_driver: Final = msgspec.msgpack.Decoder[FromDriver](FromDriver).decode
_T = TypeVar("_T")


def decode_batch(batch: Batch) -> list[FromRank]:
    """Decode a batch of frames from a rank.

    Raises:
        msgspec.DecodeError: it holds something else than messages of a rank.
        ValueError: it does not end with a whole frame.
    """
    return _decode(_from_rank, batch)


def decode_orders(batch: bytes) -> list[FromDriver]:
    """Decode a batch of frames from the driver; raises as :func:`decode_batch`."""
    return _decode(_from_driver, batch)


def _decode(decode: Callable[[Batch], _T], batch: Batch) -> list[_T]:
    try:
        return [decode(data) for data in unframe(batch)]
    except RecursionError as error:  # deeply nested lists in a field that no type asks for
        raise msgspec.DecodeError("nested too deeply") from error
