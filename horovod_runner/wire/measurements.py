"""The messages with which ranks say where their time goes; see `messages`."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

#: In ``Profile.arrivals``.
UNKNOWN: Final = -1
#: Which threads lines are of: a rank's main thread, those of DataLoader's processes, or the rank's
#: other threads while the interpreter lock was not free.
Thread = Literal["main", "loader", "others"]


class Measurement(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages here."""


class Profile(Measurement, frozen=True, gc=False):
    """Where a rank's time went in the last second or so.

    Attributes:
        time: the end of that time, in seconds since the Unix epoch, by the host's clock.
        seconds: its length.
        steps: how many steps were counted, by what counts them: "optimizer", "batches",
            "reports", "reductions".
        spent: seconds of the main thread: "data" (waiting for a batch), "report", "checkpoint",
            "waiting" (for other ranks, before a collective), "moving" (in a collective), "blocked"
            (in either of the two).
        stages: seconds of any thread, by what it does for a feed, see ``profiling.clock``.
        cells: numbers in the first part of the batches.
        threads: how many threads torch computes with; 0 if that is not known.
        bytes: of all collectives.
        collectives: how many there were.
        waited: seconds, over the collectives, until all ranks had their tensors.
        moved: seconds of the collectives themselves.
        arrivals: of some collectives, their number, the microseconds that this rank waited until
            all ranks had begun, and the microseconds from then to ``time``. Where it is not known
            when all had begun: UNKNOWN, and the microseconds since this rank has begun.
        cpu: CPU seconds of the process.
        main_cpu: CPU seconds of the main thread.
        starved: seconds in which the main thread could have run and had no core.
        late: seconds by which the sampling thread ran too late because it waited for Python's
            interpreter lock.
    """

    rank: int
    time: float
    seconds: float
    steps: dict[str, int] = {}
    spent: dict[str, float] = {}
    stages: dict[str, float] = {}
    cells: int = 0
    threads: int = 0
    bytes: int = 0
    collectives: int = 0
    waited: float = 0.0
    moved: float = 0.0
    arrivals: list[tuple[int, int, int]] = []
    cpu: float = 0.0
    main_cpu: float = 0.0
    starved: float = 0.0
    late: float = 0.0


class Machine(Measurement, frozen=True):
    """What a rank's host did in some seconds, as the task beside the rank sees it.

    Attributes:
        time: the end of that time, in seconds since the Unix epoch, by the host's clock.
        seconds: its length.
        cores: cores of the host that were busy.
        of_cores: cores that the rank's processes may use.
        throttled: seconds in which the container's CPU quota stopped its processes.
        memory: bytes of the worker and the processes that it has started.
        free_memory: bytes that the host or the container has left.
        faults: pages that the worker's processes waited for, from a disk.
        swapped: bytes that the host moved to or from swap.
        disk: bytes that the host read and wrote.
        network: bytes that the host sent and received, over all interfaces but loopback.
    """

    rank: int
    time: float
    seconds: float
    cores: float = 0.0
    of_cores: int = 0
    throttled: float = 0.0
    memory: int = 0
    free_memory: int = 0
    faults: int = 0
    swapped: int = 0
    disk: int = 0
    network: int = 0


class Lines(Measurement, frozen=True):
    """The lines that a rank's main thread, or processes of its DataLoader, were seen at.

    Attributes:
        looks: how often it was looked at, from the start of the rank.
        calls: each a file, a function and a line, separated by NUL.
        stacks: indices into ``calls``, the outermost call first; the most frequent stacks.
        counts: how often each stack was seen.
    """

    rank: int
    looks: int
    calls: list[str] = []
    stacks: list[list[int]] = []
    counts: list[int] = []
    thread: Thread = "main"
