"""A dataset on local disk, ready to be gathered from: row-major matrices, memory-mapped.

    layout.json         what is where
    fixed-0             all rows of all columns of one number type, one row behind the other
    fixed-1             ...; a vector has a matrix of its own
    ends-0              of the first column of text, bytes or lists: where each row ends in its
                        unit's values
    values-0-3          of that column, the values of the rows of unit 3
    unit-0.json         unit 0 is there, whole

All matrices are allocated before anything is written, so a disk that is too small says so at once.
A unit is what one process fills at a time: those that need the dataset claim units by file locks,
which the kernel drops with whoever holds them, and so none is waited for that is not at work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from horovod_runner.data.columns import Array, Column, Rows
from horovod_runner.data.read_ahead import ReadAhead, memory_for_files
from horovod_runner.errors import DataError
from horovod_runner.folder import check_room

_LAYOUT = "layout.json"
_MAX_BUFFERS = 6  # two in use, two waiting and two being filled
_ALIGNMENT = 64
_UNUSED = 2  # references, as sys.getrefcount tells them
_CHECK_BYTES = 1 << 26  # how much may be written before room is looked for again


class Layout(msgspec.Struct, frozen=True):
    """What is in a store.

    Attributes:
        columns: in order.
        units: the number of rows of each unit.
        fingerprint: names the data; another one is another dataset.
    """

    columns: list[Column]
    units: list[int]
    fingerprint: str = ""

    @property
    def rows(self) -> int:
        """Of all units."""
        return sum(self.units)

    def groups(self) -> list[list[Column]]:
        """The columns whose numbers share a matrix, in its order."""
        found: dict[object, list[Column]] = {}
        for column in self.columns:
            if column.is_fixed:
                key = column.dtype if column.kind == "number" else column
                found.setdefault(key, []).append(column)
        return list(found.values())

    def apart(self, chunk: Chunk) -> dict[str, Rows]:
        """A chunk's columns, by name."""
        found = dict(chunk.ragged)
        for group, matrix in zip(self.groups(), chunk.matrices, strict=True):
            at = 0
            for column in group:
                part = matrix[:, at : at + column.width]
                found[column.name] = Rows(part.reshape(chunk.rows, *column.shape))
                at += column.width
        return found

    def ragged(self) -> list[Column]:
        """The columns whose rows differ in length."""
        return [column for column in self.columns if not column.is_fixed]


class Chunk(msgspec.Struct):
    """Some consecutive rows, packed.

    Attributes:
        matrices: one for each group, of shape (rows, numbers).
        ragged: by the column's name.
    """

    rows: int
    matrices: list[Any]
    ragged: dict[str, Rows]


def pack(layout: Layout, rows: int, read: Callable[[Column], Rows]) -> Chunk:
    """Pack columns that are apart from each other."""
    matrices = []
    for group in layout.groups():
        if len(group) == 1:
            matrices.append(read(group[0]).values.reshape(rows, group[0].width))
            continue
        matrices.append(_side_by_side([read(column).values for column in group]))
    return Chunk(rows, matrices, {column.name: read(column) for column in layout.ragged()})


def _side_by_side(arrays: Sequence[Array]) -> Array:
    """Columns as a matrix."""
    matrix = np.empty((len(arrays[0]), len(arrays)), arrays[0].dtype)
    for place, array in enumerate(arrays):
        matrix[:, place] = array
    return matrix


class _Unit(msgspec.Struct):
    """What ``unit-N.json`` holds: the size of each ragged column's values in bytes."""

    sizes: dict[str, int] = {}


class Store:
    """A dataset's files in one folder.

    Args:
        folder: made by :meth:`create`.

    Raises:
        DataError: the folder holds no whole store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.layout = msgspec.json.decode((folder / _LAYOUT).read_bytes(), type=Layout)
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(f"{folder} holds no packed dataset: {error}") from error
        self._starts = np.concatenate([[0], np.cumsum(self.layout.units)])
        self._groups = self.layout.groups()
        self._matrices: list[Array] | None = None
        self._values: dict[tuple[str, int], Array] = {}
        self._ends: dict[str, Array] = {}

    def __getstate__(self) -> Path:
        return self.folder  # a mapping would be copied

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]
        self.open()

    @classmethod
    def create(cls, folder: Path, layout: Layout) -> Store:
        """Allocate a store, or take the one that another process has made there.

        Raises:
            DataError: the disk has too little room.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not (folder / _LAYOUT).exists():
                shutil.rmtree(folder, ignore_errors=True)
                check_room(folder.parent, sum(_sizes(layout).values()))
                folder.mkdir()
                try:
                    for name, size in _sizes(layout).items():
                        _allocate(folder / name, size)
                except OSError as error:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise _no_room(folder, sum(_sizes(layout).values()), error) from error
                write_layout(folder, layout)
        return cls(folder)

    def fill(
        self,
        read: Callable[[int], Iterable[Chunk]],
        done: Callable[[int, int], None] = lambda there, units: None,
    ) -> None:
        """See to it that all units are there, together with whoever else does.

        Args:
            read: gives the rows of a unit, by its number.
            done: called after each unit that was made here, with the number of those that are
                there, and of all.

        Raises:
            DataError: a unit has other rows than it should, or the disk is full.
        """
        paths = [self.folder / f"unit-{unit}.json" for unit in range(len(self.layout.units))]

        def make(unit: int) -> None:
            self._write(unit, read(unit))
            done(sum(path.exists() for path in paths), len(paths))

        together(paths, make)

    def _write(self, unit: int, chunks: Iterable[Chunk]) -> None:
        try:
            start = int(self._starts[unit])
            with Writer(self.folder, self.layout, unit, start, is_allocated=True) as writer:
                for chunk in chunks:
                    writer.append(chunk)
        except OSError as error:
            raise _no_room(self.folder, self.layout.units[unit], error) from error
        if writer.rows != self.layout.units[unit]:
            raise DataError(
                f"part {unit} of the dataset has {writer.rows} rows, and had "
                f"{self.layout.units[unit]} when the run began: it was changed meanwhile"
            )

    def open(self) -> None:
        """Map all files; what is cut short or missing is told here.

        Raises:
            DataError: a file has another size than it should.
        """
        for name, size in _sizes(self.layout).items():
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
                sizes = msgspec.json.decode(path.read_bytes(), type=_Unit).sizes
            except (OSError, msgspec.MsgspecError) as error:
                raise DataError(f"the packed dataset lacks {path}: {error}") from error
            for number, column in enumerate(self.layout.ragged()):
                values = self.folder / f"values-{number}-{unit}"
                _check_size(values, sizes[column.name])
                count = sizes[column.name] // np.dtype(column.dtype).itemsize
                self._values[column.name, unit] = _map(values, column.dtype, (count,))

    def take(
        self, rows: Array, names: Sequence[str], buffers: Buffers | None = None
    ) -> dict[str, Rows]:
        """Gather rows of some columns.

        Args:
            rows: their numbers, in the order that is wanted.
            names: of the columns.
            buffers: where to put them; None: into new memory.

        Returns:
            By name; columns of one matrix are views of what was gathered for all of them.
        """
        assert self._matrices is not None  # noqa: S101 - open() comes first
        found: dict[str, Rows] = {}
        for group, matrix in zip(self._groups, self._matrices, strict=True):
            if not any(column.name in names for column in group):
                continue
            out = None if buffers is None else buffers.get(len(rows), matrix)
            # "clip" spares NumPy a copy that keeps `out` whole should a number be wrong.
            taken = np.take(matrix, rows, axis=0, mode="clip", out=out)
            at = 0
            for column in group:
                part = taken[:, at : at + column.width]
                at += column.width
                if column.name in names:
                    found[column.name] = Rows(part.reshape(len(rows), *column.shape))
        for column in self.layout.ragged():
            if column.name in names:
                found[column.name] = self._take_ragged(column, rows)
        return found

    def _take_ragged(self, column: Column, rows: Array) -> Rows:
        units = np.searchsorted(self._starts, rows, "right") - 1
        all_ends = self._ends[column.name]
        ends = all_ends[rows]
        begins = np.where(rows > self._starts[units], all_ends[np.maximum(rows - 1, 0)], 0)
        lengths = ends - begins
        values = np.empty(int(lengths.sum()), column.dtype)
        at = 0
        pairs = zip(units.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for unit, begin, end in pairs:
            values[at : at + end - begin] = self._values[column.name, unit][begin:end]
            at += end - begin
        return Rows(values, lengths)

    def read_ahead(self, names: Sequence[str]) -> ReadAhead | None:
        """What fetches the rows of some columns from disk in an epoch; None: the system alone."""
        if sys.platform != "linux":
            return None
        assert self._matrices is not None  # noqa: S101 - open() comes first
        files = [
            (self.folder / f"fixed-{number}", self.layout.rows, matrix.shape[1] * matrix.itemsize)
            for number, (group, matrix) in enumerate(zip(self._groups, self._matrices, strict=True))
            if any(column.name in names for column in group)
        ]
        return ReadAhead(files, memory_for_files())

    def row_bytes(self, name: str) -> int:
        """About how many bytes a row of a column has."""
        column = next(column for column in self.layout.columns if column.name == name)
        if column.is_fixed:
            return column.width * np.dtype(column.dtype).itemsize
        units = range(len(self.layout.units))
        total = sum(self._values[name, unit].nbytes for unit in units)
        return 8 + total // max(1, self.layout.rows)

    def chunks(self, rows: int = 1 << 14) -> Iterator[Chunk]:
        """All rows as they are, some at a time."""
        assert self._matrices is not None  # noqa: S101 - open() comes first
        for unit, first in enumerate(self._starts[:-1]):
            last = self._starts[unit + 1]
            for start in range(first, last, rows):
                end = min(start + rows, last)
                ragged = {}
                for column in self.layout.ragged():
                    ends = np.concatenate([[0], self._ends[column.name][first:last]])
                    own = ends[start - first : end - first + 1]
                    values = self._values[column.name, unit][own[0] : own[-1]]
                    ragged[column.name] = Rows(values, np.diff(own))
                matrices = [matrix[start:end] for matrix in self._matrices]
                yield Chunk(end - start, matrices, ragged)


class Buffers:
    """Memory for gathered rows, used again once nobody holds any of them.

    Fresh memory is handed out by the kernel page by page, which takes longer than the gather. It is
    aligned so that TensorFlow takes it without a copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], list[npt.NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def get(self, rows: int, like: Array) -> Array:
        """Room for so many rows of a matrix."""
        size = rows * like.shape[1] * like.itemsize
        with self._lock:
            buffer = _unused(self._kept.setdefault((like.shape[1], like.dtype.str), []), size)
            start = -buffer.ctypes.data % _ALIGNMENT
            return buffer[start : start + size].view(like.dtype).reshape(rows, like.shape[1])


def _unused(kept: list[npt.NDArray[np.uint8]], size: int) -> npt.NDArray[np.uint8]:
    for number in range(len(kept)):
        # The list and this call hold it; so does every array or tensor that is part of it.
        if len(kept[number]) >= size + _ALIGNMENT and sys.getrefcount(kept[number]) == _UNUSED:
            return kept[number]
    made = np.empty(size + _ALIGNMENT, np.uint8)
    if len(kept) < _MAX_BUFFERS:
        kept.append(made)
    return made


class Writer:
    """Writes the rows of one unit, in order; use it as a context.

    Args:
        folder: of the store.
        layout: the store's.
        unit: its number.
        start: its first row.
        is_allocated: whether the matrices take no more room than they have.

    Attributes:
        rows: how many were written.
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
        """Write some rows.

        Raises:
            DataError: the run has no room left.
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
        view = memoryview(np.ascontiguousarray(array).data).cast("B") if array.size else b""
        while view:
            written = os.pwrite(self._files[name], view, offset)
            view, offset = view[written:], offset + written

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        if kind is None:
            types = {column.name: np.dtype(column.dtype) for column in self._layout.ragged()}
            sizes = {name: count * types[name].itemsize for name, count in self._counts.items()}
            whole = self._folder / f"unit-{self._unit}.json"
            part = whole.with_suffix(f".{os.getpid()}")
            part.write_bytes(msgspec.json.encode(_Unit(sizes)))
            part.rename(whole)


def write_layout(folder: Path, layout: Layout) -> None:
    """Say what is in a folder, once its files are there."""
    (folder / _LAYOUT).write_bytes(msgspec.json.encode(layout))


def _sizes(layout: Layout) -> dict[str, int]:
    """The files whose size is known before they are written."""
    sizes = {}
    for number, group in enumerate(layout.groups()):
        width = sum(column.width for column in group)
        sizes[f"fixed-{number}"] = layout.rows * width * np.dtype(group[0].dtype).itemsize
    for number in range(len(layout.ragged())):
        sizes[f"ends-{number}"] = layout.rows * 8
    return sizes


def _allocate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _check_size(path: Path, size: int) -> None:
    there = path.stat().st_size if path.exists() else None
    if there != size:
        raise DataError(
            f"{path} of the packed dataset has {there} bytes and should have {size}: something "
            "else has cut or removed it"
        )


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    if not np.prod(shape):
        return np.empty(shape, dtype)
    # A plain array: views of the subclass keep no common base.
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))


def _no_room(folder: Path, size: int, error: OSError) -> DataError:
    free = shutil.disk_usage(folder.parent).free
    why = "has too little room" if error.errno == errno.ENOSPC else f"cannot be written ({error})"
    return DataError(
        f"{folder.parent} {why} for the packed dataset: it takes {size / 1e6:.1f} MB, and "
        f"{free / 1e6:.1f} MB are free. Free space there, or set TMPDIR to a folder on another disk"
    )


def together(paths: Sequence[Path], make: Callable[[int], None]) -> None:
    """Make files, in some threads, together with whoever else is at it.

    Args:
        paths: of the files; each is there once it is whole.
        make: makes one, by its number.
    """
    # One reads while the other writes; ranks that share a host do so anyway, in less memory each.
    alone = os.environ.get("HOROVOD_LOCAL_SIZE", "1") == "1"
    threads = min(2 if alone else 1, len(paths))
    with ThreadPoolExecutor(threads, "horovod_runner-pack") as pool:
        for done in [pool.submit(_make_some, paths, make) for _ in range(threads)]:
            done.result()


def _make_some(paths: Sequence[Path], make: Callable[[int], None]) -> None:
    left = [number for number, path in enumerate(paths) if not path.exists()]
    # First what nobody is at, then wait for the others: should one fail, its file is ours.
    for wait in (False, True):
        for number in left:
            path = paths[number]
            with _locked(path.with_suffix(".lock"), wait=wait) as locked:
                if locked and not path.exists():
                    make(number)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a file's lock; gives whether it was got."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
