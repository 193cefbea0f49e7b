"""Reads what Horovod's background thread has recorded of its collectives.

Our build of Horovod keeps the last collectives in memory (horovod_build/overlay/horovod/common/
activity.h). Where another Horovod is installed there is nothing to read.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

_ROOM: Final = 4096  # HorovodActivityLog::room
_MODULES: Final = ("horovod.torch.mpi_ops", "horovod.tensorflow.mpi_ops")
_NANO: Final = 1e-9
#: The process set of collectives of torch.distributed's group of all ranks, over the backend hvd.
TORCH_SET: Final = -1


class _Activity(ctypes.Structure):
    """``HorovodActivity`` in activity.h; times are nanoseconds of the steady clock."""

    _fields_ = (
        ("sequence", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("queued", ctypes.c_int64),
        ("started", ctypes.c_int64),
        ("ended", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("tensors", ctypes.c_int32),
        ("process_set", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("name", ctypes.c_char * 64),
    )


class _ActivityTotals(ctypes.Structure):
    """``HorovodActivityTotals`` in activity.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("count", "waiting", "moving", "bytes", "waited", "moved", "most")
    )


class Collective(NamedTuple):
    """One collective of one rank, of one or several fused tensors.

    Attributes:
        number: the same on all ranks of the process set.
        process_set: Horovod's id of the set; TORCH_SET, or below it for other groups of torch.
        bytes: of all its tensors.
        queued: when this rank had all tensors, in seconds of the monotonic clock.
        started: when all ranks had them; None where that is not known.
        ended: when the result was there; None where that is not known.
    """

    number: int
    process_set: int
    bytes: int
    queued: float
    started: float | None
    ended: float | None


class Totals(NamedTuple):
    """What the collectives of a rank have taken since its start.

    Attributes:
        bytes: of all their tensors.
        waiting: seconds in which ``main`` was blocked in ``synchronize`` before a collective began.
        moving: seconds in which it was blocked while one was going on.
        waited: seconds, over all collectives, until all ranks had their tensors.
        moved: seconds, over all, of the collectives themselves.
        most: how often the tensor was reduced that was reduced most often.
    """

    collectives: int = 0
    bytes: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    waited: float = 0.0
    moved: float = 0.0
    most: int = 0


def tails(collectives: Iterable[Collective]) -> tuple[float, float]:
    """The time that collectives take of a step whose main thread does not wait for them itself.

    A framework's graph begins them while it still computes. Of collectives that overlap, only the
    time after the last one was queued counts: then nothing is computed any more.

    Returns:
        Seconds of waiting, and of moving.
    """
    waiting = moving = end = 0.0
    last: Collective | None = None
    for each in sorted(collectives, key=lambda each: each.queued):
        if each.started is None or each.ended is None:
            continue
        if last is not None and last.started is not None and each.queued >= end:
            waiting += last.started - last.queued
            moving += end - last.started
        last, end = each, max(end, each.ended)
    if last is not None and last.started is not None:
        waiting += last.started - last.queued
        moving += end - last.started
    return waiting, moving


class CollectiveLog:
    """The collectives of this process since the last call of :meth:`take`.

    Attributes:
        totals: what all have taken. Where ``main`` does not wait in ``synchronize``, because a
            framework's graph reduces, waiting and moving are what :func:`tails` finds.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._read: Any = None
        self._after = ctypes.c_int64(0)
        self._buffer = (_Activity * _ROOM)()
        self._sums = _ActivityTotals()
        self._in_graph = (0.0, 0.0)

    def take(self, most: int) -> list[Collective]:
        """Return some collectives that have ended since the last call, see :func:`chosen`."""
        if self._read is None:
            self._read = _reader()
            if self._read is None:
                return []
        before = self.totals
        self._copy(1, 0)  # for the totals
        count, sums = self._sums.count - before.collectives, self._sums
        has_graph = sums.count > 0 and not (sums.waiting or sums.moving)
        taken = self._copy(1 if has_graph else _stride(count, most), _ROOM)
        if has_graph:
            waiting, moving = tails(taken)
            self._in_graph = (self._in_graph[0] + waiting, self._in_graph[1] + moving)
            taken = chosen(taken, most)
        self.totals = Totals(
            sums.count,
            sums.bytes,
            sums.waiting * _NANO + self._in_graph[0],
            sums.moving * _NANO + self._in_graph[1],
            sums.waited * _NANO,
            sums.moved * _NANO,
            sums.most,
        )
        return taken

    def _copy(self, every: int, room: int) -> list[Collective]:
        count = self._read(
            ctypes.byref(self._after),
            ctypes.c_int64(every),
            self._buffer,
            ctypes.c_int64(room),
            ctypes.byref(self._sums),
        )
        return [_collective(record) for record in self._buffer[:count]]


def chosen(collectives: Sequence[Collective], most: int) -> list[Collective]:
    """At most so many of some collectives; other ranks choose the same ones.

    These are the numbers that are divisible by a power of two. The power depends on how many there
    are, so one that is chosen at a higher rate is chosen at a lower one, too.
    """
    stride = _stride(len(collectives), most)
    return [each for each in collectives if each.number % stride == 0]


def _stride(count: int, most: int) -> int:
    """The smallest power of two that leaves at most so many."""
    stride = 1
    while count > most * stride:
        stride *= 2
    return stride


def _collective(record: _Activity) -> Collective:
    return Collective(
        record.number,
        record.process_set,
        record.bytes,
        min(record.queued or record.started, record.started) * _NANO,
        record.started * _NANO,
        record.ended * _NANO,
    )


def _reader() -> Any:
    """The function of the loaded Horovod; None if none is loaded, or another build."""
    for name in _MODULES:
        library = getattr(getattr(sys.modules.get(name), "_basics", None), "MPI_LIB_CTYPES", None)
        function = getattr(library, "horovod_runner_activity", None)
        if function is not None:
            function.restype = ctypes.c_int64
            return function
    return None
