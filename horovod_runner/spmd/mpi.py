"""The ranks of a program that MPI started, through mpi4py.

Nothing here blocks inside MPI: that would keep a core busy and would not notice failures. Requests
are started and tested, and between unsuccessful tests the process sleeps.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from horovod_runner.errors import RankFailedError
from horovod_runner.spmd.peers import Peers, RankBuffer, peer_error

_FAILED, _DATA = 1, 2  # tags
_PARTS_IN_FLIGHT = 8
_LENGTH = struct.Struct("=q")
_TESTS = 2000  # before the first look for failures, and before the first sleep
_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 50e-6, 0.05


class MpiPeers(Peers):
    """The ranks of an mpi4py communicator, on a duplicate of it.

    Messages therefore cannot mix with those of the program.
    """

    by_mpi = True

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self._subset: Any = None
        self._failure_sends: list[Any] = []  # keeps requests and their buffers alive
        self.rank: int = comm.rank
        self.size: int = comm.size

    def allgather(self, value: bytes) -> list[bytes]:
        byte = self._mpi.BYTE
        lengths = bytearray(_LENGTH.size * self.size)
        length = _LENGTH.pack(len(value))
        self._wait([self._comm.Iallgather([length, byte], [lengths, byte])])
        counts = [count for (count,) in _LENGTH.iter_unpack(lengths)]
        gathered = bytearray(sum(counts))
        self._wait([self._comm.Iallgatherv([value, byte], [gathered, counts, byte])])
        ends = accumulate(counts)
        return [bytes(gathered[end - n : end]) for n, end in zip(counts, ends, strict=True)]

    def exchange(self, outgoing: Iterator[RankBuffer], incoming: Sequence[RankBuffer]) -> None:
        byte = self._mpi.BYTE
        receives = [self._comm.Irecv([p.data, byte], source=p.rank, tag=_DATA) for p in incoming]
        while parts := list(islice(outgoing, _PARTS_IN_FLIGHT)):
            sends = [self._comm.Isend([p.data, byte], dest=p.rank, tag=_DATA) for p in parts]
            # No sleep: MPI moves data in both directions only while it is called.
            self._wait(sends, idle=False)
        self._wait(receives, idle=False)

    def finish(self) -> None:
        self._wait([self._comm.Ibarrier()])

    def fail(self, failure: bytes) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                request = self._comm.Isend([failure, self._mpi.BYTE], dest=rank, tag=_FAILED)
                self._failure_sends.append((request, failure))
        if self._failure_sends:  # MPI sends only while it is called
            self._mpi.Request.Testall([request for request, _ in self._failure_sends])

    def failure(self, seconds: float) -> RankFailedError | None:
        deadline = time.monotonic() + seconds
        while True:
            status = self._mpi.Status()
            if self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=_FAILED, status=status):
                failure = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv([failure, self._mpi.BYTE], source=status.Get_source(), tag=_FAILED)
                return peer_error(failure)
            if time.monotonic() >= deadline:
                return None
            time.sleep(_MAX_SLEEP_SECONDS / 10)

    def _wait(self, requests: list[Any], *, idle: bool = True) -> None:
        """Wait until all requests are complete; with ``idle``, sleep between tests."""
        tests, pause = 0, _MIN_SLEEP_SECONDS
        while not self._mpi.Request.Testall(requests):
            tests += 1
            looks = tests % _TESTS == 0 or (idle and tests > _TESTS)
            if looks and (failure := self.failure(0)):
                raise failure
            if idle and tests > _TESTS:
                time.sleep(pause)
                pause = min(2 * pause, _MAX_SLEEP_SECONDS)
            else:
                os.sched_yield()  # there may be more ranks than cores

    def subset(self, ranks: Sequence[int]) -> Any:
        inside = self.rank in ranks
        color = 0 if inside else self._mpi.UNDEFINED
        part = self._comm.Split(color, ranks.index(self.rank) if inside else 0)
        self._subset = part if inside else None
        return self._subset

    def close(self, *, together: bool) -> None:
        if together:
            for comm in filter(None, (self._subset, self._comm)):
                comm.Free()
