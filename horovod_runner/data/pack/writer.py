"""Writes packed rows to the files of a store."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from horovod_runner.common.descriptors import write_all
from horovod_runner.data.pack.columns import Array
from horovod_runner.data.pack.file_locks import write_whole
from horovod_runner.data.pack.layout import Chunk, Layout
from horovod_runner.host.scratch import check_room

_CHECK_BYTES = 1 << 26  # free room is checked again after this many bytes


class Writer:
    """Writes the rows of one unit, in order; a context manager.

    The matrices need no more room if they are allocated already.

    Attributes:
        rows: rows written so far.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        unit: int = 0,
        start: int = 0,
        *,
        is_allocated: bool = False,
    ) -> None:
        self.rows = 0
        self._folder = folder
        self._layout = layout
        self._unit = unit
        self._start = start
        self._is_allocated = is_allocated
        self._room = 0
        self._files: dict[str, int] = {}
        self._counts = {column.name: 0 for column in layout.ragged()}

    def __enter__(self) -> Writer:
        for number in range(len(self._layout.groups())):
            self._open(f"fixed-{number}")
        for number in range(len(self._counts)):
            self._open(f"ends-{number}")
            self._open(f"values-{number}-{self._unit}", os.O_TRUNC)
        return self

    def _open(self, name: str, flags: int = 0) -> None:
        self._files[name] = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | flags, 0o600)

    def append(self, chunk: Chunk) -> None:
        """Write rows behind those written before.

        Raises:
            DataError: the run's limit or the disk leaves too little room.
            OSError: the disk is full.
        """
        self._make_room(chunk)
        first = self._start + self.rows
        for number, matrix in enumerate(chunk.matrices):
            size = matrix.shape[1] * matrix.dtype.itemsize
            self._write(f"fixed-{number}", matrix, first * size)
        for number, (name, count) in enumerate(self._counts.items()):
            rows = chunk.ragged[name]
            assert rows.lengths is not None  # noqa: S101 - it is ragged
            ends = np.cumsum(rows.lengths, dtype=np.int64) + count
            self._write(f"ends-{number}", ends, first * 8)
            self._write(f"values-{number}-{self._unit}", rows.values, count * rows.values.itemsize)
            self._counts[name] += len(rows.values)
        self.rows += chunk.rows

    def _make_room(self, chunk: Chunk) -> None:
        arrays = [rows.values for rows in chunk.ragged.values()]
        if not self._is_allocated:
            arrays += chunk.matrices
        size = sum(array.nbytes for array in arrays)
        if size > self._room:
            self._room = max(size, _CHECK_BYTES)
            check_room(self._folder.parent, size)
        self._room -= size

    def _write(self, name: str, array: Array, offset: int) -> None:
        if array.size:  # an empty array has no view as bytes
            view = memoryview(np.ascontiguousarray(array).data).cast("B")
            write_all(self._files[name], view, offset)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while self._files:  # once, although an error in what follows leads here again
            os.close(self._files.popitem()[1])
        if kind is None:
            types = {column.name: np.dtype(column.stored_dtype) for column in self._layout.ragged()}
            sizes = {name: count * types[name].itemsize for name, count in self._counts.items()}
            path = self._folder / f"unit-{self._unit}.json"
            write_whole(path, msgspec.json.encode(sizes))
