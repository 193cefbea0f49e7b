"""Reads Arrow rows as NumPy arrays, and decides from rows what their type leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from horovod_runner.data.pack.columns import (
    Array,
    Column,
    Columns,
    Rows,
    Sizes,
    cells_dtype,
    name_of,
)
from horovod_runner.data.pack.nested import (
    column_at,
    is_list,
    is_ml_vector,
    leaves,
    map_values,
    matches,
)
from horovod_runner.errors import DataError


def read(batch: pa.RecordBatch, column: Column, fill_null: object = None, first: int = 0) -> Rows:
    """Read one column of a record batch.

    Args:
        batch: Arrow rows.
        column: the column to read.
        fill_null: the value that replaces nulls; None refuses them.
        first: number of the first row in the dataset, for error messages.

    Raises:
        DataError: there are nulls and no ``fill_null``, or rows of another length than the column.
    """
    array = _plain(column_at(batch, column.name))
    if pa.types.is_struct(array.type):
        return _read_ml_vectors(_without_nulls(array, column, None), column, first)
    if column.kind in ("text", "bytes"):
        return read_bytes(_without_nulls(array, column, fill_null))
    if column.kind == "number":
        return Rows(_to_numpy(_without_nulls(array, column, fill_null), column))
    array = _without_nulls(array, column, None)
    if column.kind == "object":
        return _read_objects(array, column, fill_null)
    lengths, level = None, 0
    while is_list(array.type):
        if level:
            _refuse_nulls_inside(array, column, "lists")
        if not pa.types.is_fixed_size_list(array.type):
            lengths = numbers_of(pc.list_value_length(array)).astype(np.int64)
            if column.kind == "vector":
                _check_lengths(lengths, column, level, first)
        array, level = array.flatten(), level + 1
    if fill_null is None:
        _refuse_nulls_inside(array, column, "numbers")
    values = _to_numpy(_without_nulls(array, column, fill_null), column)
    if column.kind == "list":
        return Rows(values, lengths)
    return Rows(values.reshape(batch.num_rows, *column.shape))


def _plain(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _refuse_nulls_inside(array: pa.Array, column: Column, what: str) -> None:
    if array.null_count:
        raise DataError(
            f"column {column.name!r} has nulls in its lists ({array.null_count} of {len(array)} "
            f"{what}), and a tensor cannot hold nulls. Filter those rows out, or give a value for "
            f"nulls: parquet(..., fill_null={{{column.name!r}: 0}}), or functions.transform for a "
            "DataFrame"
        )


def _check_lengths(lengths: Array, column: Column, level: int, first: int) -> None:
    width = column.shape[level]
    odd = np.flatnonzero(lengths != width)
    if len(odd):
        row = first + int(odd[0]) // int(np.prod(column.shape[:level]))
        raise DataError(
            f"column {column.name!r} has rows of {width} and of {lengths[odd[0]]} values, as in "
            f"row {row}. The first rows all had {width}, so it was taken for a vector: if lengths "
            f"may differ, name it in ragged=[{column.name!r}]"
        )


def _read_objects(array: pa.Array, column: Column, fill_null: object) -> Rows:
    """Lists of lists, or of text: each cell as MessagePack."""
    inner = array
    while is_list(inner.type):
        inner = inner.flatten()
        is_last = not is_list(inner.type)
        if not is_last or fill_null is None:
            _refuse_nulls_inside(inner, column, "entries" if is_last else "lists")

    def simple(values: pa.Array) -> pa.Array:
        values = _plain(values)
        if values.null_count and fill_null is not None:
            values = pc.fill_null(values, pa.scalar(fill_null, type=values.type))
        if column.is_ragged_text:
            return values.cast(pa.large_string() if column.dtype == "str" else pa.large_binary())
        values = _numbers(values)
        return values.cast(pa.float32()) if values.type == pa.float16() else values

    cells = [msgspec.msgpack.encode(cell) for cell in map_values(array, simple).to_pylist()]
    lengths = np.fromiter(map(len, cells), np.int64, len(cells))
    return Rows(np.frombuffer(b"".join(cells), np.uint8), lengths)


def _without_nulls(array: pa.Array, column: Column, fill_null: object) -> pa.Array:
    if not array.null_count:
        return array
    if fill_null is None:
        message = (
            f"column {column.name!r} has nulls ({array.null_count} in a batch of {len(array)} "
            "rows), and a tensor cannot hold nulls. Leave those rows out"
        )
        if column.kind not in ("vector", "list", "object"):
            message += (
                f", or give a value for nulls: fill_null={{{column.name!r}: 0}}, or df.fillna for "
                "a DataFrame (an Imputer in a Pipeline)"
            )
        raise DataError(message)
    return pc.fill_null(array, pa.scalar(fill_null, type=array.type))


def _to_numpy(array: pa.Array, column: Column) -> Array:
    return numbers_of(_numbers(array)).astype(column.dtype, copy=False)


def _numbers(array: pa.Array) -> pa.Array:
    """Decimals, dates and times as plain numbers."""
    type_ = array.type
    if pa.types.is_decimal(type_):
        return array.cast(pa.float64())
    if pa.types.is_date(type_):
        return array.cast(pa.date32()).view(pa.int32())
    if not pa.types.is_temporal(type_):
        return array
    if pa.types.is_timestamp(type_):
        in_microseconds = pa.timestamp("us", type_.tz)
    else:
        in_microseconds = pa.time64("us") if pa.types.is_time(type_) else pa.duration("us")
    return array.cast(in_microseconds, safe=False).view(pa.int64())


def numbers_of(array: pa.Array) -> Array:
    """Numbers or booleans without nulls, as a read-only NumPy array. Booleans are copied.

    Arrow's own ``to_numpy`` imports pandas, which takes half a second of the first batch.
    """
    if pa.types.is_boolean(array.type):
        return numbers_of(array.cast(pa.uint8())).view(bool)
    dtype = np.dtype(name_of(array.type))
    if not len(array):
        return np.empty(0, dtype)
    numbers = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    numbers.flags.writeable = False
    return numbers


def read_bytes(array: pa.Array) -> Rows:
    """The bytes of cells of text or bytes without nulls, as a view."""
    is_text = cells_dtype(array.type) == "str"
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    large = array.cast(pa.large_string() if is_text else pa.large_binary())
    _, offsets_buffer, data = large.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, len(large) + 1, large.offset * 8)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Rows(values[offsets[0] : offsets[-1]], np.diff(offsets))


def _vector_sizes(array: pa.StructArray) -> Array:
    dense = numbers_of(pc.equal(array.field("type"), 1))
    lengths = numbers_of(pc.fill_null(pc.list_value_length(array.field("values")), 0))
    sizes = numbers_of(pc.fill_null(array.field("size"), 0))
    return np.where(dense, lengths, sizes).astype(np.int64)


def has_sparse(array: pa.Array) -> bool:
    """Whether some of Spark's vectors are sparse."""
    return bool(pc.any(pc.equal(array.field("type"), 0)).as_py())


def _read_ml_vectors(array: pa.StructArray, column: Column, first: int) -> Rows:
    """Read Spark's vectors: dense ones have only values, sparse ones also indices and a size."""
    dense = numbers_of(pc.equal(array.field("type"), 1))
    values, indices = array.field("values"), array.field("indices")
    lengths = numbers_of(pc.fill_null(pc.list_value_length(values), 0)).astype(np.int64)
    wide = _vector_sizes(array)
    width = column.width if column.width > 0 else int(wide[0]) if len(wide) else 0
    _check_lengths(wide, Column(column.name, "vector", "float64", (width,)), 0, first)
    matrix = np.zeros((len(array), width))
    flat = numbers_of(values.flatten())
    row = np.repeat(np.arange(len(array)), lengths)
    of_dense = dense[row]
    matrix[dense] = flat[of_dense].reshape(-1, width)
    matrix[row[~of_dense], numbers_of(indices.flatten())] = flat[~of_dense]
    return Rows(matrix)


def sizes_of(array: pa.Array) -> Sizes:
    """The shortest and the longest length of lists, by level; of Spark ML vectors, of their size.

    A level without lists has (0, 0). Nulls do not count.
    """
    if is_ml_vector(array.type):
        array = array.filter(pc.is_valid(array)) if array.null_count else array
        wide = _vector_sizes(array)
        return [(int(wide.min()), int(wide.max()))] if len(wide) else [(0, 0)]
    sizes = []
    while is_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            low = high = array.type.list_size
        else:
            both = pc.min_max(pc.list_value_length(array))
            low, high = both["min"].as_py() or 0, both["max"].as_py() or 0
        sizes.append((low, high))
        array = array.flatten()
    return sizes


def joined(sizes: Iterable[Sizes]) -> Sizes:
    """The shortest and the longest lengths of several parts of a column."""
    levels = zip(*sizes, strict=True)
    return [(min(low for low, _ in level), max(high for _, high in level)) for level in levels]


def settled(column: Column, sizes: Sizes) -> Column:
    """A list as a vector, if all its rows have the same lengths."""
    if not sizes or any(low != high for low, high in sizes):
        return column
    return Column(column.name, "vector", column.dtype, tuple(high for _, high in sizes))


def settle(column: Column, batches: Iterable[pa.RecordBatch], ragged: Sequence[str] = ()) -> Column:
    """Decide from some rows whether a list, if not ``ragged``, is a vector, and how long one is."""
    if column.is_settled or (column.kind in ("list", "object") and column.name in ragged):
        return column
    sizes = [sizes_of(_plain(column_at(batch, column.name))) for batch in batches if batch.num_rows]
    if column.shape == (-1,) and column.kind == "vector":
        width = sizes[0][0][0] if sizes else 0
        return Column(column.name, "vector", column.dtype, (width,))
    return settled(column, joined(sizes)) if sizes else column


def check_fill_nulls(schema: pa.Schema, columns: Columns, fill_null: Mapping[str, object]) -> None:
    """Check that values can replace the nulls of columns."""
    types = leaves(schema)
    for name, value in fill_null.items():
        template = next((each for each in columns.maps if matches(each, name)), name)
        if template not in types:
            raise DataError(
                f"fill_null names the column {name!r}, and there is none: the columns are "
                f"{', '.join(columns.listed)}"
            )
        check_fill_null(name, types[template], value)


def check_fill_null(name: str, type_: pa.DataType, fill_null: object) -> None:
    """Check that a value can replace the nulls of a column; raises DataError."""
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    while not pa.types.is_primitive(type_) and hasattr(type_, "value_type"):
        type_ = type_.value_type
    try:
        value = pa.scalar(fill_null, type=type_).as_py()
        if isinstance(value, int) and value != fill_null:  # Arrow cuts the fraction off
            raise ValueError("it is not a whole number")
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"fill_null has {fill_null!r} for nulls of column {name!r}, which is {type_}: {error}"
        ) from error
