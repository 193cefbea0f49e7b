"""PackedStore: a packed dataset on local disk, in memory-mapped matrices.

Rows are gathered from it. `layout` says which files there are. All matrices are allocated before
any row is written, so a disk that is too small is noticed at once. The processes that need the
dataset pack it together, one unit at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from horovod_runner.common.text import bytes_text, sizes_text
from horovod_runner.data.pack.buffers import Buffers
from horovod_runner.data.pack.columns import Array, Column, Rows
from horovod_runner.data.pack.file_locks import locked, make_together
from horovod_runner.data.pack.layout import Chunk, Layout, columns_in, decode_unit_sizes
from horovod_runner.data.pack.writer import Writer
from horovod_runner.errors import DataError
from horovod_runner.host.scratch import check_room


class MatrixFile(NamedTuple):
    """One matrix on disk."""

    path: Path
    rows: int
    row_bytes: int


class PackedStore:
    """A packed dataset in a folder that :meth:`create` has made.

    Raises:
        DataError: the folder has no layout.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layout = Layout.load(folder)
        self._starts = np.concatenate([[0], np.cumsum(self.layout.units)])
        self._groups = self.layout.groups()
        self._matrices: list[Array] | None = None
        self._values: dict[tuple[str, int], Array] = {}
        self._ends: dict[str, Array] = {}

    def __getstate__(self) -> Path:
        return self.folder  # pickle would copy the mapped files

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]
        self.open()

    @classmethod
    def create(cls, folder: Path, layout: Layout) -> PackedStore:
        """Allocate a store, or use the one that another process has allocated there.

        Raises:
            DataError: the disk has too little room.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock")):
            if not Layout.is_saved(folder):
                sizes = layout.allocated_sizes()
                shutil.rmtree(folder, ignore_errors=True)
                check_room(folder.parent, sum(sizes.values()))
                folder.mkdir()
                try:
                    for name, size in sizes.items():
                        _allocate(folder / name, size)
                    layout.save(folder)
                except OSError as error:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise _write_error(folder, sum(sizes.values()), error) from error
        return cls(folder)

    def fill(
        self,
        read: Callable[[int], Iterable[Chunk]],
        done: Callable[[int, int], None] = lambda complete, units: None,
    ) -> None:
        """Pack all units, together with the other processes that need them.

        Args:
            read: yields the rows of a unit, by its number.
            done: called after each unit that this process has packed, with the numbers of complete
                units and of all.

        Raises:
            DataError: a unit has another number of rows than expected, or the disk is full.
        """
        paths = [self.folder / f"unit-{unit}.json" for unit in range(len(self.layout.units))]

        def make(unit: int) -> None:
            self._write(unit, read(unit))
            done(sum(path.exists() for path in paths), len(paths))

        make_together(paths, make)

    def _write(self, unit: int, chunks: Iterable[Chunk]) -> None:
        try:
            start = int(self._starts[unit])
            with Writer(self.folder, self.layout, unit, start, is_allocated=True) as writer:
                for chunk in chunks:
                    writer.append(chunk)
        except OSError as error:
            raise _write_error(self.folder, None, error) from error
        if writer.rows != self.layout.units[unit]:
            raise DataError(
                f"part {unit} of the dataset has {writer.rows} rows, and had "
                f"{self.layout.units[unit]} when the run began: the data changed meanwhile. Train "
                "on a copy that nobody writes to"
            )

    def open(self) -> None:
        """Map all files into memory."""
        for name, size in self.layout.allocated_sizes().items():
            _check_size(self.folder / name, size)
        self._matrices = []
        for number, group in enumerate(self._groups):
            shape = (self.layout.rows, sum(column.width for column in group))
            self._matrices.append(_map(self.folder / f"fixed-{number}", group[0].dtype, shape))
        for number, column in enumerate(self.layout.ragged()):
            ends = _map(self.folder / f"ends-{number}", "int64", (self.layout.rows,))
            self._ends[column.name] = ends
        for unit in range(len(self.layout.units)):
            path = self.folder / f"unit-{unit}.json"
            try:
                sizes = decode_unit_sizes(path.read_bytes())
            except (OSError, msgspec.MsgspecError) as error:
                raise DataError(
                    f"the packed dataset lacks {path}: {error}. Something removed or damaged it "
                    "during the run"
                ) from error
            for number, column in enumerate(self.layout.ragged()):
                values = self.folder / f"values-{number}-{unit}"
                _check_size(values, sizes[column.name])
                count = sizes[column.name] // np.dtype(column.stored_dtype).itemsize
                self._values[column.name, unit] = _map(values, column.stored_dtype, (count,))

    def take(
        self, rows: Array, names: Sequence[str], buffers: Buffers | None = None
    ) -> dict[str, Rows]:
        """Gather rows of some columns, by their numbers; into memory of ``buffers``, if given.

        Returns:
            The rows by column; columns of one matrix are views of one gathered array.
        """
        assert self._matrices is not None  # noqa: S101 - open() comes first
        gathered: dict[str, Rows] = {}
        for group, matrix in zip(self._groups, self._matrices, strict=True):
            if not any(column.name in names for column in group):
                continue
            out = None
            if buffers is not None:
                out = buffers.get(len(rows), matrix.shape[1:], matrix.dtype)
            # mode="clip" avoids the copy that NumPy makes to keep `out` intact after an IndexError.
            taken = np.take(matrix, rows, axis=0, mode="clip", out=out)
            for name, values in columns_in(taken, group):
                if name in names:
                    gathered[name] = values
        for column in self.layout.ragged():
            if column.name in names:
                gathered[column.name] = self._take_ragged(column, rows)
        return gathered

    def _take_ragged(self, column: Column, rows: Array) -> Rows:
        units = np.searchsorted(self._starts, rows, "right") - 1
        all_ends = self._ends[column.name]
        ends = all_ends[rows]
        begins = np.where(rows > self._starts[units], all_ends[np.maximum(rows - 1, 0)], 0)
        lengths = ends - begins
        values = np.empty(int(lengths.sum()), column.stored_dtype)
        at = 0
        pairs = zip(units.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for unit, begin, end in pairs:
            values[at : at + end - begin] = self._values[column.name, unit][begin:end]
            at += end - begin
        return Rows(values, lengths)

    def matrix_files(self, names: Sequence[str]) -> list[MatrixFile]:
        """The matrices that hold some columns."""
        assert self._matrices is not None  # noqa: S101 - open() comes first
        return [
            MatrixFile(
                self.folder / f"fixed-{number}",
                self.layout.rows,
                matrix.shape[1] * matrix.itemsize,
            )
            for number, (group, matrix) in enumerate(zip(self._groups, self._matrices, strict=True))
            if any(column.name in names for column in group)
        ]

    def row_bytes(self, name: str) -> int:
        """Bytes per row of a column; an average if rows differ in length."""
        column = next(column for column in self.layout.columns if column.name == name)
        if column.is_fixed:
            return column.width * np.dtype(column.dtype).itemsize
        units = range(len(self.layout.units))
        total = sum(self._values[name, unit].nbytes for unit in units)
        return 8 + total // max(1, self.layout.rows)

    def chunks(self, rows: int = 1 << 14) -> Iterator[Chunk]:
        """All rows in their order, at most ``rows`` at a time."""
        assert self._matrices is not None  # noqa: S101 - open() comes first
        for unit, first in enumerate(self._starts[:-1]):
            last = self._starts[unit + 1]
            for start in range(first, last, rows):
                end = min(start + rows, last)
                ragged = {}
                for column in self.layout.ragged():
                    ends = np.concatenate([[0], self._ends[column.name][first:last]])
                    bounds = ends[start - first : end - first + 1]
                    values = self._values[column.name, unit][bounds[0] : bounds[-1]]
                    ragged[column.name] = Rows(values, np.diff(bounds))
                matrices = [matrix[start:end] for matrix in self._matrices]
                yield Chunk(end - start, matrices, ragged)


def _allocate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _check_size(path: Path, size: int) -> None:
    actual = path.stat().st_size if path.exists() else None
    if actual is None:
        raise DataError(
            f"{path} of the packed dataset no longer exists: something removed it during the run"
        )
    if actual != size:
        raise DataError(
            f"{path} of the packed dataset has {actual:,} bytes instead of {size:,}: something "
            "cut it during the run"
        )


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    if not np.prod(shape):
        return np.empty(shape, dtype)
    try:
        # As a plain array: views of np.memmap have no common base.
        return np.asarray(np.memmap(path, dtype, "r", shape=shape))
    except OSError as error:
        if error.errno != errno.ENODEV:  # not every mounted store can map files into memory
            raise
        return np.fromfile(path, dtype).reshape(shape)


def _write_error(folder: Path, size: int | None, error: OSError) -> DataError:
    """The error of a full or broken disk; ``size`` is None if what is needed is not known."""
    free = shutil.disk_usage(folder.parent).free
    why = "has too little room" if error.errno == errno.ENOSPC else f"cannot be written ({error})"
    room = bytes_text(free)
    if size is not None:
        needed, room = sizes_text(size, free)
        room = f"it needs {needed}, and {room}"
    return DataError(
        f"{folder.parent} {why} for the packed dataset: {room} are free. Free space there, or set "
        "TMPDIR to a folder on another disk"
    )
