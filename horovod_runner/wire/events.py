"""The events of a run: what its log holds, and what sinks are told.

Those of a rank are messages that the driver passes on. The driver adds its own. To add an event,
write its class here, and put it into the union: ``messages.RankEvent`` for those of a rank, the one
below for those of the driver. Then send it, and show it in a method of ``sinks.Sink`` or in
``results.recorder``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

import msgspec

from horovod_runner.common.slots import Controller, RankInfo
from horovod_runner.wire.marker import Marker

Status = Literal["running", "finished", "failed", "cancelled"]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MOST_LEFT_OUT: Final = 2**62  # what adds such numbers stops there, so that they fit into 64 bits


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all that travels between driver and ranks."""


class Event(Message, frozen=True):
    """Base of all events.

    Attributes:
        kept: which ones are kept where there is no room for all: "all" of those that are few, the
            latest "text", an even choice of "reports", the "latest", or the "last" with a key.
    """

    kept: ClassVar[Literal["all", "text", "reports", "latest", "last"]] = "all"

    @property
    def key(self) -> object:
        """For "last": an event replaces the earlier one with the same key."""
        return type(self)


class Began(Event, frozen=True):
    """A rank is about to call ``main``."""

    rank: int


class Output(Event, frozen=True):
    """Text that a rank printed: whole lines, except in the last piece and in runs of one rank."""

    kept: ClassVar[Literal["text"]] = "text"
    rank: int
    stream: Literal["stdout", "stderr"]
    text: str


class Log(Event, frozen=True):
    """The argument of a ``log_to_driver`` call."""

    kept: ClassVar[Literal["text"]] = "text"
    rank: int
    text: str


class Report(Event, frozen=True, gc=False):
    """The arguments of a ``report`` call.

    Attributes:
        metrics: numbers by name; NaN and infinity are allowed.
        time: of the call, in seconds since the Unix epoch, by the clock of the rank's host.
        left_out: how many earlier reports of this rank were dropped because the pipe was full.
        total_steps: the number of steps of the whole training; None if the call did not say.
    """

    kept: ClassVar[Literal["reports"]] = "reports"
    rank: int
    metrics: Mapping[str, int | float]
    step: Int64 | None = None
    epoch: Int64 | None = None
    time: float = 0.0
    left_out: Annotated[int, msgspec.Meta(ge=0, le=MOST_LEFT_OUT)] = 0
    total_steps: Int64 | None = None


class Saved(Event, frozen=True):
    """A rank has written a checkpoint: into its folder, or as file parts before this message."""

    rank: int
    marker: Marker


class Unsaved(Event, frozen=True):
    """A checkpoint could not be written. Earlier ones are unharmed."""

    rank: int
    step: int
    reason: str


class Untraced(Event, frozen=True):
    """A rank will send no trace, although ``torch_profiler`` asks for one."""

    rank: int
    reason: str


class AttemptBegan(Event, frozen=True):
    """All ranks are about to be launched.

    Attributes:
        number: 1 for the first launch, plus 1 for each restart.
        resumed_from: the step of the latest checkpoint; None if there is none.
    """

    number: int
    resumed_from: int | None = None


class ControllerChosen(Event, frozen=True):
    """Horovod coordinates and reduces on CPUs with this library."""

    name: Controller


class RanksPlaced(Event, frozen=True):
    """All ranks have started; or, with exit codes, have ended."""

    ranks: list[RankInfo]


class Notice(Event, frozen=True):
    """A message of the runner for the user."""

    text: str


class CheckpointKept(Event, frozen=True):
    """A checkpoint is complete."""

    folder: str
    marker: Marker


class TraceFile(NamedTuple):
    """A file with a trace, on the driver's machine.

    Attributes:
        rank: the rank that wrote it.
        kind: "horovod": Horovod's timeline, which rank 0 writes for all ranks; "torch",
            "tensorflow": steps of the rank, as its framework's profiler saw them.
        path: of the file.
    """

    rank: int
    kind: Literal["horovod", "torch", "tensorflow"]
    path: str


class TraceWritten(Event, frozen=True):
    """A file with a trace is here."""

    trace: TraceFile


class AttemptFailed(Event, frozen=True):
    """An attempt has failed: the error in one line, and the whole of it."""

    error: str
    details: str


class AttemptChanged(Event, frozen=True):
    """An attempt has ended in favour of another number of ranks."""

    reason: str


class RunEnded(Event, frozen=True):
    """The last event; see ``results.run.Run``."""

    status: Status
    warnings: list[str]
    result_text: str


#: What the driver adds to the events of the ranks.
DriverEvent = (
    AttemptBegan
    | ControllerChosen
    | RanksPlaced
    | Notice
    | CheckpointKept
    | TraceWritten
    | AttemptFailed
    | AttemptChanged
    | RunEnded
)
