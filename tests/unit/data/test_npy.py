"""Cells in NumPy's file format."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data.pack import npy
from horovod_runner.errors import DataError


def cell(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array), **options)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", ["float32", ">i4", "int8", "uint64", "float16", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 2), (0,)])
def test_cells_of_one_shape_become_one_matrix(dtype: str, shape: tuple[int, ...]) -> None:
    arrays = [np.full(shape, number % 2, dtype) for number in range(5)]
    decoded = npy.decode(pa.array([cell(array) for array in arrays]), "c")
    assert decoded.to_pylist() == [array.tolist() for array in arrays]


def test_a_slice_of_a_column_is_decoded() -> None:
    cells = pa.array([cell([number, number]) for number in range(5)])
    assert npy.decode(cells[2:4], "c").to_pylist() == [[2, 2], [3, 3]]


def test_cells_of_different_lengths_become_lists() -> None:
    decoded = npy.decode(pa.array([cell([1.5]), cell([]), cell([2.5, 3.5])]), "c")
    assert decoded.to_pylist() == [[1.5], [], [2.5, 3.5]]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([cell([1, 2])[:-1]], r"'c' .*\(2,\).* 15 .* 16\b"),
        ([cell([1, 2])[:20]], "'c' .*complete NumPy"),
        ([b"something else entirely"], "'c' .*complete NumPy"),
        ([cell([[1, 2]]), cell([[1, 2], [3, 4]])], "different shapes"),
        ([cell(np.asfortranarray(np.ones((2, 2))))], "float64 .*Fortran"),
        ([cell(["text"])], "arrays of <U4"),
        ([cell([{1: 2}], allow_pickle=True)], "arrays of object"),
    ],
)
def test_cells_that_are_not_arrays_of_numbers_are_refused(cells: list[bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        npy.decode(pa.array(cells), "c")
