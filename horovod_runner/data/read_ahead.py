"""What the next batches lie in, asked for many parts at a time: a gather would wait for each.

A matrix that fits into memory is asked for in large parts, each of them once: many rows of an
epoch lie in each. Of one that does not, what is not wanted now is gone before it is, so that only
what the rows lie in is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from horovod_runner.data.columns import Array

_LARGE_BYTES = 1 << 17  # what Linux reads at a time by itself
_SMALL_BYTES = 1 << 13
_LOOKED_AT = 16


@dataclass
class _Matrix:
    """One file.

    Attributes:
        path: of the file.
        row_bytes: of each row.
        asked: the large parts that were asked for; None where only what is wanted is.
    """

    path: Path
    row_bytes: int
    asked: Array | None


class ReadAhead:
    """One epoch's.

    Args:
        files: each with the number of rows and the bytes of a row.
        memory: how many bytes the system has for files.
    """

    def __init__(self, files: Sequence[tuple[Path, int, int]], memory: int) -> None:
        self._matrices = []
        for path, rows, row_bytes in sorted(files, key=lambda file: file[1] * file[2]):
            size = rows * row_bytes
            memory -= size
            stays = memory > 0 and row_bytes < _LARGE_BYTES
            asked = np.zeros(-(-size // _LARGE_BYTES), np.bool_) if stays else None
            self._matrices.append(_Matrix(path, row_bytes, asked))

    def ask(self, rows: Array) -> None:
        """Let the system fetch what some rows lie in."""
        if not len(rows):
            return
        ordered: Array | None = None
        for matrix in self._matrices:
            if matrix.asked is not None and matrix.asked.all():
                continue
            with matrix.path.open("rb", buffering=0) as file:
                if matrix.asked is not None:
                    ranges = _once(matrix.asked, rows * matrix.row_bytes, matrix.row_bytes)
                else:
                    few = rows[:: max(1, len(rows) // _LOOKED_AT)]
                    if _in_memory(file.fileno(), few * matrix.row_bytes):
                        continue
                    ordered = np.sort(rows) if ordered is None else ordered
                    ranges = _around(ordered * matrix.row_bytes, matrix.row_bytes)
                for start, end in ranges:
                    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)


def memory_for_files() -> int:
    """How many bytes the system has for what it keeps of files."""
    told = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    return min([int(told) << 10, *_limits()])


def _limits() -> Iterator[int]:
    """What a container or a resource manager lets this process use: cgroups(7), both versions."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup", controllers)
        for folder in (root / own[1:], root):  # a container may see its own as the root
            file = folder / ("memory.limit_in_bytes" if controllers else "memory.max")
            with suppress(OSError, ValueError):  # "max"
                yield int(file.read_text())


def _once(asked: Array, starts: Array, size: int) -> Iterator[tuple[int, int]]:
    """The large parts that some rows lie in, but for those that were asked for."""
    wanted = np.zeros_like(asked)
    wanted[starts // _LARGE_BYTES] = True
    wanted[(starts + (size - 1)) // _LARGE_BYTES] = True
    wanted[asked] = False
    asked[wanted] = True
    for part in np.flatnonzero(wanted).tolist():
        yield part * _LARGE_BYTES, (part + 1) * _LARGE_BYTES


def _around(starts: Array, size: int) -> Iterator[tuple[int, int]]:
    """What some rows lie in, in small parts; starts: of the rows, ascending."""
    first, last = starts // _SMALL_BYTES, (starts + (size - 1)) // _SMALL_BYTES
    breaks = np.flatnonzero(first[1:] > last[:-1] + 1)
    begins, ends = first[np.append(0, breaks + 1)], last[np.append(breaks, -1)] + 1
    yield from zip((begins * _SMALL_BYTES).tolist(), (ends * _SMALL_BYTES).tolist(), strict=True)


def _in_memory(file: int, places: Array) -> bool:
    """Whether some bytes of a file are, as far as the system tells."""
    byte = [bytearray(1)]
    try:
        return all(os.preadv(file, byte, place, os.RWF_NOWAIT) for place in places.tolist())
    except BlockingIOError:
        return False
    except OSError:
        return True  # a filesystem that cannot tell
