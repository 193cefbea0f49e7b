"""What the ranks of a program need of each other before Horovod starts.

MPI gives it (mpi.py), or sockets between all of them (mesh.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol


class NeighbourFailedError(Exception):
    """Another rank has said that it failed.

    Attributes:
        failure: what it said.
    """

    def __init__(self, failure: bytes) -> None:
        super().__init__(failure)
        self.failure = failure


class Part(NamedTuple):
    """Bytes on their way from or to another rank: a buffer, read or written in place."""

    rank: int
    data: memoryview


class Neighbours(Protocol):
    """All ranks of the program. Every call but ``fail`` is made by all of them, in one order.

    Each raises NeighbourFailedError where another rank has called ``fail`` meanwhile.

    Attributes:
        by_mpi: whether an MPI has started them.
    """

    by_mpi: bool
    rank: int
    size: int

    def allgather(self, value: bytes) -> list[bytes]:
        """Everybody's value, in the order of ranks; some kilobytes."""

    def exchange(self, outgoing: Iterator[Part], incoming: Sequence[Part]) -> None:
        """Send and receive buffers; of several to one rank the order is kept.

        Args:
            outgoing: made as they are sent, so that few of them are there at a time.
            incoming: each as large as the one that is sent for it.
        """

    def finish(self) -> None:
        """Wait, without work for a core, until all have called this."""

    def fail(self, failure: bytes) -> None:
        """Tell the others that this rank has failed; waits for nobody."""

    def failure(self, seconds: float) -> bytes | None:
        """What another rank said of its failure, if one does so within so many seconds."""

    def subset(self, ranks: Sequence[int]) -> Any:
        """An MPI communicator of some ranks, in that order; None where there is no MPI."""

    def close(self, *, together: bool) -> None:
        """Let the others go; ``together`` says that all do so now, and none has failed."""
