"""The messages with which ranks say where their time goes; see `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import msgspec

from horovod_runner.wire.events import Event, Message

#: In ``Profile.arrivals``.
UNKNOWN: Final = -1
#: Which threads lines are of: a rank's main thread, those of DataLoader's processes, or the rank's
#: other threads while the interpreter lock was not free.
Thread = Literal["main", "loader", "others"]


class Profile(Event, frozen=True, gc=False):
    """Where a rank's time went in the last second or so.

    Attributes:
        time: the end of that time, in seconds since the Unix epoch, by the host's clock.
        seconds: its length.
        steps: how many steps were counted, by what counts them: "optimizer", "batches",
            "reports", "reductions"; 0 for what counted earlier in the run, and not now.
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
        arrivals: of some collectives, their number (below 0 for torch.distributed's over the
            backend hvd), the microseconds that this rank waited until all ranks had begun, and the
            microseconds from then to ``time``. Where it is not known when all had begun: UNKNOWN,
            and the microseconds since this rank has begun.
        cpu: CPU seconds of the process.
        main_cpu: CPU seconds of the main thread.
        starved: seconds in which the main thread could have run and had no core.
        late: seconds by which the sampling thread ran too late because it waited for Python's
            interpreter lock; scaled as if it had run fifty times a second.
    """

    kept: ClassVar[Literal["latest"]] = "latest"
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


#: By which counts steps are told, the best first: the first one that is present counts.
STEP_SOURCES: Final = ("optimizer", "batches", "reports", "reductions")


def steps_of(steps: Mapping[str, int]) -> int:
    """The number of steps in a summary, by its ``steps``."""
    return next((steps[name] for name in STEP_SOURCES if name in steps), 0)


class Machine(Event, frozen=True):
    """What a rank's host and processes did in some seconds, as the task beside the rank sees it.

    The counters of the whole host are read by the task of its first rank alone: in the messages of
    the others the attributes named in :data:`OF_HOST` are 0. ``RunProfile`` fills them in.

    Attributes:
        time: the end of that time, in seconds since the Unix epoch, by the host's clock.
        seconds: its length.
        cores: cores of the host that were busy.
        of_cores: cores that the rank's processes may use.
        throttled: seconds in which the container's CPU quota stopped its processes.
        memory: bytes of the worker and the processes that it has started. Pages that several of
            them share count in each.
        free_memory: bytes that the host or the container has left.
        faults: pages that the worker's processes waited for, from a disk.
        swapped: bytes that the host moved to or from swap.
        disk: bytes that the host read and wrote.
        network: bytes that the host sent and received, over all interfaces but loopback.
        host_rank: the first rank of the host; -1 means this one.
        own_cores: cores that the rank's processes kept busy; of the first rank of a host with the
            process of its task, which is the driver's where the ranks are its child processes.
        other_cores: cores that were busy with what is not this run's; filled in by ``RunProfile``.
        host_cores: cores of the host.
        quota: cores that the container's CPU quota allows; 0 without a quota.
        memory_limit: bytes of which ``free_memory`` is left: the host's memory, or the container's
            limit.
        children_memory: the part of ``memory`` that processes have which the worker started.
        grown: bytes by which ``memory`` has grown in the last minute.
        shared_memory: bytes in /dev/shm.
        received: the part of ``network`` that the host received.
        io_wait: cores that were idle while a process waited for a disk.
        stolen: cores of a virtual machine that waited for a core of its host.
        cpu_stall, memory_stall, io_stall: shares of the time in which some process of the host
            waited for a core, for memory that had been moved out, or for a disk (Linux's pressure
            stall information).
        frequency: of the cores, in MHz; 0 where it is not known.
        hot: the share of the time in which a processor was slowed because it was hot.
        gpus: how many GPUs of the rank could be read; the four attributes below are of these.
        gpu_busy: the share of the last second in which a kernel ran on them, on average.
        gpu_memory, gpu_memory_limit: bytes in use on them, and bytes that they have.
        gpus_slowed: how many are slowed because of heat or their power supply.
        killed: how many processes of the container, or of the host where there is none, the kernel
            has ended because memory was used up.
    """

    kept: ClassVar[Literal["latest"]] = "latest"
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
    host_rank: int = -1
    own_cores: float = 0.0
    other_cores: float = 0.0
    host_cores: int = 0
    quota: float = 0.0
    memory_limit: int = 0
    children_memory: int = 0
    grown: int = 0
    shared_memory: int = 0
    received: int = 0
    io_wait: float = 0.0
    stolen: float = 0.0
    cpu_stall: float = 0.0
    memory_stall: float = 0.0
    io_stall: float = 0.0
    frequency: float = 0.0
    hot: float = 0.0
    gpus: int = 0
    gpu_busy: float = 0.0
    gpu_memory: int = 0
    gpu_memory_limit: int = 0
    gpus_slowed: int = 0
    killed: int = 0


#: The attributes of `Machine` that are the same for all ranks of a host.
OF_HOST: Final = (
    "cores",
    "other_cores",
    "host_cores",
    "swapped",
    "disk",
    "network",
    "received",
    "io_wait",
    "stolen",
    "cpu_stall",
    "memory_stall",
    "io_stall",
    "frequency",
    "hot",
)


class MemoryUse(msgspec.Struct, frozen=True):
    """What a rank's processes have in memory, and what is left for them; all in bytes.

    Attributes:
        limit: the host's memory, or the limit of the container.
        free: what is left of it; files that are only cached count as free.
        in_container: whether the limit is a container's.
        worker: of the rank's own process.
        children: of the processes that it has started, DataLoader workers for example. Pages that
            they share with it count here too.
        processes: how many those are.
        grown: by how much these processes have grown.
        seconds: in which time.
        shared: in /dev/shm, by whatever process.
        killed: how many processes of the container, or of the host where there is none, the kernel
            has ended in the last minute because memory was used up; None where it does not tell.
        age: how old this is, in seconds, when it is sent.
    """

    limit: int
    free: int
    in_container: bool = False
    worker: int = 0
    children: int = 0
    processes: int = 0
    grown: int = 0
    seconds: float = 0.0
    shared: int = 0
    killed: int | None = None
    age: float = 0.0


class MemoryShort(Message, frozen=True):
    """A rank's host or container will soon have no memory left.

    Attributes:
        host: its name.
        seconds: how long it lasts at the present growth.
    """

    rank: int
    host: str
    seconds: float
    use: MemoryUse


class Lines(Event, frozen=True):
    """The lines that a rank's main thread, or processes of its DataLoader, were seen at.

    Attributes:
        total: the sum of all counts, also of stacks that are left out, from the start of the rank.
        calls: each a file, a function and a line, separated by NUL.
        stacks: indices into ``calls``, the outermost call first; the most frequent stacks.
        counts: for how many microseconds each stack was seen; of "others", how often.
    """

    kept: ClassVar[Literal["last"]] = "last"
    rank: int
    total: int
    calls: list[str] = []
    stacks: list[list[int]] = []
    counts: list[int] = []
    thread: Thread = "main"

    @property
    def key(self) -> object:
        """See Event: the lines of a thread replace earlier ones."""
        return type(self), self.rank, self.thread


class Waiting(msgspec.Struct, frozen=True):
    """A collective of torch.distributed that a rank has entered and that has not ended.

    Attributes:
        name: "all_reduce number 12 of shape [64]", the same on all ranks that have entered it.
        ranks: the ranks of its process group; empty for all ranks.
    """

    name: str
    ranks: list[int] = []


class Waits(Message, frozen=True):
    """The collectives that a rank waits in; repeated while it waits.

    Unlike other messages of a rank, it is no sign of progress.
    """

    rank: int
    collectives: list[Waiting]


_WAITS_TAG: Final = msgspec.msgpack.encode("Waits")


def is_waits(data: bytes) -> bool:
    """Whether an encoded message is a Waits; without decoding it."""
    return data.startswith(_WAITS_TAG, 1)  # the first byte is the number of fields


#: See ``Note.kind``.
NoteKind = Literal["weights", "feed", "file", "mistake"]


class Note(Message, frozen=True):
    """What a rank's code did, for a comparison with the other ranks' (`driver.sync_check`).

    Attributes:
        kind: "weights": digests of some weights and the learning rates, before or after a step.
            "feed": a feed was read for the first time; the key has the dataset's name and, on a
            line of its own, the feed's number. "file": a file was written, or files in a folder,
            whose key ends with a slash. "mistake": the user made one.
        key: a rank's n-th note of a kind and key is compared with the n-th of the other ranks.
        value: what should be the same on all ranks; the text of a mistake.
        where: the line of the user's code, "train.py:41"; empty if it is not known.
    """

    rank: int
    kind: NoteKind
    key: str
    value: str
    where: str
