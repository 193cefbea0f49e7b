"""Cells in NumPy's own file format, as Petastorm's NdarrayCodec writes them; none is unpickled.

All cells of a column have the same header as long as their type and shape are the same: the column
is then one matrix, of which the header is cut off, and no cell is looked at by itself.
"""

from __future__ import annotations

import io
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from horovod_runner.data.columns import Array
from horovod_runner.errors import DataError

Dtype: TypeAlias = np.dtype[Any]


def decode(array: pa.Array, name: str, *, ragged: bool = False) -> pa.Array:
    """A column of numbers, of (nested) fixed-size lists, or of lists where lengths differ.

    Args:
        array: binary cells, without nulls.
        name: of the column, for messages.
        ragged: whether lengths may differ: the column is one of lists in any case.

    Raises:
        DataError: a cell is no whole array of numbers, or shapes of more than one dimension differ.
    """
    cells = array.cast(pa.large_binary())
    _, offsets_buffer, data = cells.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, len(cells) + 1, cells.offset * 8)
    lengths = np.diff(offsets)
    whole = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    if len(cells) and (lengths == lengths[0]).all():
        matrix = whole.reshape(len(cells), -1)
        start, dtype, shape = _header(cells[0].as_py(), name)
        _check_size(matrix.shape[1] - start, dtype, shape, name)
        if 0 not in shape and (matrix[:, :start] == matrix[0, :start]).all():
            values = np.frombuffer(matrix[:, start:].tobytes(), dtype)
            values = values.astype(dtype.newbyteorder("="), copy=False)
            if ragged and len(shape) == 1:
                return _ragged(values, np.arange(len(cells) + 1) * shape[0])
            return lists(values, shape)
    rows = [_read(cell, name) for cell in cells.to_pylist()]
    if any(row.ndim != 1 for row in rows):
        raise DataError(f"column {name!r} has arrays of different shapes")
    return _ragged(np.concatenate(rows), np.cumsum([0, *(len(row) for row in rows)]))


def _ragged(values: Array, ends: Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(values))


def _header(cell: bytes, name: str) -> tuple[int, Dtype, tuple[int, ...]]:
    stream = io.BytesIO(cell)
    try:
        own: Any = np.lib.format  # which has no types
        version = own.read_magic(stream)
        old = version == (1, 0)
        read = own.read_array_header_1_0 if old else own.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError as error:
        raise DataError(f"column {name!r} has a cell that is no whole array: {error}") from error
    if dtype.hasobject or (fortran and len(shape) > 1) or dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} has arrays of {dtype}"
            f"{' in Fortran order' if fortran else ''}, which are not read without Petastorm"
        )
    return stream.tell(), dtype, shape


def _check_size(size: int, dtype: Dtype, shape: tuple[int, ...], name: str) -> None:
    if size != dtype.itemsize * int(np.prod(shape)):
        raise DataError(f"column {name!r} has a cell that is no whole array of shape {shape}")


def lists(values: Array, shape: tuple[int, ...]) -> pa.Array:
    """Arrays of one shape, one behind the other, as (nested) fixed-size lists."""
    found = pa.array(values)
    for size in reversed(shape):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found


def _read(cell: bytes, name: str) -> Array:
    start, dtype, shape = _header(cell, name)
    _check_size(len(cell) - start, dtype, shape, name)
    values = np.frombuffer(cell, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)
