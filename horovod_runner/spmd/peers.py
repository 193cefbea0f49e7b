"""The interface to the other ranks of a program before Horovod runs: by MPI or by sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from horovod_runner.errors import RankFailedError


class Failure(msgspec.Struct, frozen=True):
    """The message of a failed rank to the others."""

    rank: int
    hostname: str
    pid: int
    text: str


_decode_failure: Final = msgspec.msgpack.Decoder(Failure).decode


def peer_error(failure: bytes | bytearray) -> RankFailedError:
    """Return the error to raise here for another rank's :class:`Failure`."""
    failed = _decode_failure(failure)
    return RankFailedError(
        f"rank {failed.rank} of the program, on {failed.hostname}, failed:\n{failed.text}",
        rank=failed.rank,
        host=failed.hostname,
        pid=failed.pid,
    )


class RankBuffer(NamedTuple):
    """A buffer to send to a rank or to receive from it; read or written in place."""

    rank: int
    data: memoryview


class Peers(Protocol):
    """All ranks of the program. All of them make each call except ``fail``, in the same order.

    Each call raises RankFailedError if another rank has called ``fail`` meanwhile.

    Attributes:
        by_mpi: whether MPI started the ranks.
        rank: the number of this rank.
        size: the number of ranks.
    """

    by_mpi: bool
    rank: int
    size: int

    def allgather(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in the order of ranks; for some kilobytes."""

    def exchange(self, outgoing: Iterator[RankBuffer], incoming: Sequence[RankBuffer]) -> None:
        """Send and receive buffers; those to one rank arrive in the order of sending.

        Args:
            outgoing: the buffers to send. They are created as they are sent, so only a few exist at
                a time.
            incoming: the buffers to fill, each as large as the one that is sent for it.
        """

    def finish(self) -> None:
        """Wait, with almost no CPU time, until all ranks have called this."""

    def fail(self, failure: bytes) -> None:
        """Tell the others that this rank has failed; does not wait for them."""

    def failure(self, seconds: float) -> RankFailedError | None:
        """Return another rank's failure; None if none arrives within ``seconds``."""

    def subset(self, ranks: Sequence[int]) -> Any:
        """Return an MPI communicator of some ranks, in that order; None without MPI."""

    def close(self, *, together: bool) -> None:
        """Disconnect; ``together`` says that all ranks do so now, and that none has failed."""
