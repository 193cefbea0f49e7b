"""Readahead: prefetches the file ranges of the next batches with posix_fadvise.

A gather would wait for each page by itself. A matrix that fits into memory is requested in large
parts, each part once: an epoch needs many of its rows. Of a larger matrix only the pages of the
wanted rows are requested: anything more would be evicted before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from horovod_runner.data.pack.columns import Array
from horovod_runner.data.pack.store import MatrixFile

_LARGE_BYTES = 1 << 17  # Linux's default readahead
_SMALL_BYTES = 1 << 13
_SAMPLED_ROWS = 16


class ReadAhead:
    """Requests the rows of one epoch; the system can cache ``memory`` bytes of files."""

    def __init__(self, files: Sequence[MatrixFile], memory: int) -> None:
        # For each large part, whether it was requested; None requests single rows.
        self._requested: list[tuple[MatrixFile, Array | None]] = []
        for file in sorted(files, key=lambda file: file.rows * file.row_bytes):
            size = file.rows * file.row_bytes
            memory -= size
            stays = memory > 0 and file.row_bytes < _LARGE_BYTES
            requested = np.zeros(-(-size // _LARGE_BYTES), np.bool_) if stays else None
            self._requested.append((file, requested))

    def request(self, rows: Array) -> None:
        """Ask the system to read the pages of some rows, by their numbers, without waiting."""
        ordered: Array | None = None
        for (path, _, row_bytes), requested in self._requested:
            if requested is not None and requested.all():
                continue
            with path.open("rb", buffering=0) as file:
                if requested is not None:
                    ranges = _large_parts(requested, rows * row_bytes, row_bytes)
                else:
                    few = rows[:: max(1, len(rows) // _SAMPLED_ROWS)]
                    if _in_memory(file.fileno(), few * row_bytes):
                        continue
                    ordered = np.sort(rows) if ordered is None else ordered
                    ranges = _small_parts(ordered * row_bytes, row_bytes)
                for start, end in ranges:
                    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)


def _large_parts(requested: Array, starts: Array, size: int) -> Iterator[tuple[int, int]]:
    """The large parts that hold some rows, except those ``requested`` before; updates that."""
    wanted = np.zeros_like(requested)
    wanted[starts // _LARGE_BYTES] = True
    wanted[(starts + (size - 1)) // _LARGE_BYTES] = True
    wanted[requested] = False
    requested[wanted] = True
    for part in np.flatnonzero(wanted).tolist():
        yield part * _LARGE_BYTES, (part + 1) * _LARGE_BYTES


def _small_parts(starts: Array, size: int) -> Iterator[tuple[int, int]]:
    """The small parts that hold some rows, neighbours joined; ``starts`` must be ascending."""
    first, last = starts // _SMALL_BYTES, (starts + (size - 1)) // _SMALL_BYTES
    breaks = np.flatnonzero(first[1:] > last[:-1] + 1)
    begins, ends = first[np.append(0, breaks + 1)], last[np.append(breaks, -1)] + 1
    yield from zip((begins * _SMALL_BYTES).tolist(), (ends * _SMALL_BYTES).tolist(), strict=True)


def _in_memory(file: int, places: Array) -> bool:
    """Whether some bytes of a file are cached; True if the filesystem cannot tell."""
    byte = [bytearray(1)]
    try:
        return all(os.preadv(file, byte, place, os.RWF_NOWAIT) for place in places.tolist())
    except BlockingIOError:
        return False
    except OSError:
        return True
