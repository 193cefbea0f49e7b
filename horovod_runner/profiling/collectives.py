"""Reads what Horovod's background thread has recorded of its collectives.

Our build of Horovod keeps the last collectives in memory (horovod_build/overlay/horovod/common/
activity.h). Where another Horovod is installed there is nothing to read.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

_ROOM: Final = 4096  # HorovodActivityLog::room
_MODULES: Final = ("horovod.torch.mpi_ops", "horovod.tensorflow.mpi_ops")
_NANO: Final = 1e-9


class _Record(ctypes.Structure):
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


class Collective(NamedTuple):
    """One collective of one rank, of one or several fused tensors.

    Attributes:
        number: the same on all ranks of the process set.
        process_set: Horovod's id of the set.
        bytes: of all its tensors.
        queued: when this rank had all tensors, in seconds of the monotonic clock.
        started: when all ranks had them; None where that is not known.
        ended: when the result was there; None where that is not known.
        name: of the tensor that this rank had last.
    """

    number: int
    process_set: int
    bytes: int
    queued: float
    started: float | None
    ended: float | None
    name: str

    @property
    def waited(self) -> float:
        """Seconds until all ranks had their tensors."""
        return 0.0 if self.started is None else self.started - self.queued

    @property
    def moved(self) -> float:
        """Seconds of the collective itself."""
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started


class Totals(NamedTuple):
    """What the collectives of a rank have taken since its start.

    Attributes:
        waiting: seconds in which ``main`` was blocked in ``synchronize`` before a collective began.
        moving: seconds in which it was blocked while one was going on.
    """

    waiting: float = 0.0
    moving: float = 0.0


def tails(collectives: Iterable[Collective]) -> Totals:
    """What collectives take of a step whose main thread does not wait for them itself.

    A framework's graph begins them while it still computes. Of those that overlap, what comes after
    the last one has been queued is taken for the time in which nothing is computed.
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
    return Totals(waiting, moving)


class Collectives:
    """The collectives of this process since the last call of :meth:`take`.

    Attributes:
        totals: what they have taken since the start of the process.
    """

    def __init__(self) -> None:
        self._read: Any = None
        self._sequence = 0
        self._buffer = (_Record * _ROOM)()
        self.totals = Totals()

    @property
    def has_any(self) -> bool:
        """Whether there was one since the start of the process."""
        return self._sequence > 0

    def take(self) -> list[Collective]:
        """Return the collectives that have ended since the last call; at most 4096."""
        if self._read is None:
            self._read = _reader()
            if self._read is None:
                return []
        totals = (ctypes.c_int64 * 3)()
        after, room = ctypes.c_int64(self._sequence), ctypes.c_int64(_ROOM)
        count = self._read(after, self._buffer, room, totals)
        self.totals = Totals(totals[1] * _NANO, totals[2] * _NANO)
        taken = []
        for record in self._buffer[:count]:
            if not record.ended:
                break  # next time
            self._sequence = record.sequence
            taken.append(_collective(record))
        return taken


def _collective(record: _Record) -> Collective:
    return Collective(
        record.number,
        record.process_set,
        record.bytes,
        min(record.queued or record.started, record.started) * _NANO,
        record.started * _NANO,
        record.ended * _NANO,
        record.name.decode(errors="replace"),
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
