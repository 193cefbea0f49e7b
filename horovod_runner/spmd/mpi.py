"""The ranks that an MPI started, by mpi4py.

Nothing here waits inside MPI, which keeps a core busy and hears of no failure: requests are made
and tested, and between two tests that found nothing this process sleeps.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from horovod_runner.spmd.neighbours import NeighbourFailedError, Part

_FAILED, _DATA = 1, 2  # tags
_PARTS_UNDER_WAY = 8
_LENGTH = struct.Struct("=q")
_TESTS = 2000  # before this process looks whether somebody failed, and sleeps for the first time
_SHORTEST_SECONDS, _LONGEST_SECONDS = 50e-6, 0.05


class MpiNeighbours:
    """An mpi4py communicator's ranks; messages are kept apart from those of the program."""

    by_mpi = True

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self._subset: Any = None
        self._told: list[Any] = []  # requests whose buffers must live
        self.rank: int = comm.rank
        self.size: int = comm.size

    def allgather(self, value: bytes) -> list[bytes]:
        """As :class:`Neighbours`."""
        byte = self._mpi.BYTE
        lengths = bytearray(_LENGTH.size * self.size)
        own = _LENGTH.pack(len(value))
        self._wait([self._comm.Iallgather([own, byte], [lengths, byte])])
        counts = [count for (count,) in _LENGTH.iter_unpack(lengths)]
        gathered = bytearray(sum(counts))
        self._wait([self._comm.Iallgatherv([value, byte], [gathered, counts, byte])])
        ends = accumulate(counts)
        return [bytes(gathered[end - n : end]) for n, end in zip(counts, ends, strict=True)]

    def exchange(self, outgoing: Iterator[Part], incoming: Sequence[Part]) -> None:
        """As :class:`Neighbours`."""
        byte = self._mpi.BYTE
        receives = [self._comm.Irecv([p.data, byte], source=p.rank, tag=_DATA) for p in incoming]
        while sent := list(islice(outgoing, _PARTS_UNDER_WAY)):
            sends = [self._comm.Isend([p.data, byte], dest=p.rank, tag=_DATA) for p in sent]
            self._wait(sends, idle=False)  # MPI moves data when it is called, in both directions
        self._wait(receives, idle=False)

    def finish(self) -> None:
        """As :class:`Neighbours`."""
        self._wait([self._comm.Ibarrier()])

    def fail(self, failure: bytes) -> None:
        """As :class:`Neighbours`."""
        for rank in range(self.size):
            if rank != self.rank:
                request = self._comm.Isend([failure, self._mpi.BYTE], dest=rank, tag=_FAILED)
                self._told.append((request, failure))
        if self._told:  # MPI sends when it is called
            self._mpi.Request.Testall([request for request, _ in self._told])

    def failure(self, seconds: float) -> bytes | None:
        """As :class:`Neighbours`."""
        deadline = time.monotonic() + seconds
        while True:
            status = self._mpi.Status()
            if self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=_FAILED, status=status):
                failure = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv([failure, self._mpi.BYTE], source=status.Get_source(), tag=_FAILED)
                return bytes(failure)
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LONGEST_SECONDS / 10)

    def _wait(self, requests: list[Any], *, idle: bool = True) -> None:
        """Until all requests are done; sleeps between tests if ``idle``.

        Raises:
            NeighbourFailedError: another rank failed.
        """
        tests, pause = 0, _SHORTEST_SECONDS
        while not self._mpi.Request.Testall(requests):
            tests += 1
            if tests % _TESTS == 0 or (idle and tests > _TESTS):
                failure = self.failure(0)
                if failure is not None:
                    raise NeighbourFailedError(failure)
            if idle and tests > _TESTS:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SECONDS)
            else:
                os.sched_yield()  # there may be more ranks than cores

    def subset(self, ranks: Sequence[int]) -> Any:
        """As :class:`Neighbours`."""
        inside = self.rank in ranks
        color = 0 if inside else self._mpi.UNDEFINED
        part = self._comm.Split(color, ranks.index(self.rank) if inside else 0)
        self._subset = part if inside else None
        return self._subset

    def close(self, *, together: bool) -> None:
        """As :class:`Neighbours`."""
        if together:
            for part in filter(None, (self._subset, self._comm)):
                part.Free()
