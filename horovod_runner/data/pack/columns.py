"""Column types: maps Arrow types to NumPy arrays and refuses types that cannot become tensors.

numbers, bool               unchanged
decimal                     float64
date                        int32, days since 1970
timestamp, time, duration   int64, microseconds (timestamps since 1970, UTC)
string, binary              text and bytes
fixed-size list             a vector; nested lists give more dimensions
list                        a vector if all rows have the same length, otherwise ragged
Spark ML vector             a float64 vector; sparse ones become dense
struct                      its fields, with dotted names
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from horovod_runner.errors import DataError

Kind = Literal["number", "vector", "list", "text", "bytes"]
Array = npt.NDArray[Any]
_ML_VECTOR: Final = ("type", "size", "indices", "values")
# NumPy's names of types that Arrow names otherwise.
_FLOATS: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Column:
    """Name and type of one column.

    Attributes:
        name: dotted for a field of a struct.
        kind: the rows of a "list", "text" or "bytes" column differ in length.
        dtype: NumPy's name of the number type; "uint8" for text and bytes.
        shape: shape of one row; empty unless ``kind`` is "vector". (-1,) is a vector whose length
            the type does not say.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Numbers per row of a column with rows of one length."""
        return int(np.prod(self.shape))

    @property
    def is_settled(self) -> bool:
        """Whether the type alone decides the column; a list may still turn out to be a vector."""
        return self.kind != "list" and -1 not in self.shape

    @property
    def is_fixed(self) -> bool:
        """Whether all rows have the same length."""
        return self.kind in ("number", "vector")


@dataclass(frozen=True)
class Rows:
    """Rows of one column.

    Attributes:
        values: shape (rows, *column.shape) if all rows have one length, otherwise the values of
            all rows, concatenated.
        lengths: values per row, shape (rows,); None if all rows have one length.
    """

    values: Array
    lengths: Array | None = None

    def part(self, start: int, end: int) -> Rows:
        """Rows ``start`` to ``end``."""
        if self.lengths is None:
            return Rows(self.values[start:end])
        first, last = int(self.lengths[:start].sum()), int(self.lengths[:end].sum())
        return Rows(self.values[first:last], self.lengths[start:end])

    def cut(self, values: Any) -> list[Any]:
        """Cut all values, in any form, into those of each row, for rows that differ in length."""
        assert self.lengths is not None  # noqa: S101 - they differ
        ends = np.cumsum(self.lengths).tolist()
        return [values[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """All columns by name, with structs replaced by their fields."""
    types: dict[str, pa.DataType] = {}
    for field in schema:
        _add_leaves(field.name, field.type, types)
    return types


def _add_leaves(name: str, type_: pa.DataType, types: dict[str, pa.DataType]) -> None:
    if pa.types.is_struct(type_) and not _is_ml_vector(type_):
        for field in type_:
            _add_leaves(f"{name}.{field.name}", field.type, types)
    else:
        types[name] = type_


def column_of(name: str, type_: pa.DataType) -> Column:
    """Map an Arrow type to a column; a vector of unknown length gets the shape (-1,).

    Raises:
        DataError: the type cannot become a tensor.
    """
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    dtype = _number_dtype(type_)
    if dtype is not None:
        return Column(name, "number", dtype)
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return Column(name, "text", "uint8")
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return Column(name, "bytes", "uint8")
    if _is_ml_vector(type_):
        return Column(name, "vector", "float64", (-1,))
    shape: list[int] = []
    inner = type_
    while pa.types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    dtype = _number_dtype(inner)
    if shape and dtype is not None:
        return Column(name, "vector", dtype, tuple(shape))
    if (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and (
        dtype := _number_dtype(type_.value_type)
    ) is not None:
        return Column(name, "list", dtype)
    raise DataError(
        f"column {name!r} of type {type_} cannot become a tensor: leave it out, or turn it into "
        "numbers, lists of numbers, text or bytes first"
    )


def columns_of(schema: pa.Schema) -> dict[str, Column]:
    """Map all columns of a schema, by name.

    Raises:
        DataError: a column cannot become a tensor.
    """
    return {name: column_of(name, type_) for name, type_ in leaves(schema).items()}


def _is_ml_vector(type_: pa.DataType) -> bool:
    return pa.types.is_struct(type_) and tuple(field.name for field in type_) == _ML_VECTOR


def _name_of(type_: pa.DataType) -> str:
    """NumPy's name of a type of whole or floating-point numbers."""
    return _FLOATS.get(str(type_), str(type_))


def _number_dtype(type_: pa.DataType) -> str | None:
    """NumPy's name of the type that one number per row becomes; None if it is not a number."""
    if pa.types.is_boolean(type_):
        return "bool"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return _name_of(type_)
    if pa.types.is_decimal(type_):
        return "float64"
    if pa.types.is_date(type_):
        return "int32"
    if pa.types.is_timestamp(type_) or pa.types.is_time(type_) or pa.types.is_duration(type_):
        return "int64"
    return None


def read(batch: pa.RecordBatch, column: Column, fill_null: object = None) -> Rows:
    """Read one column of a record batch.

    Args:
        batch: Arrow rows.
        column: the column to read.
        fill_null: the value that replaces nulls; None refuses them.

    Raises:
        DataError: there are nulls and no ``fill_null``, or rows of another length than the column.
    """
    array = field_of(batch, column.name)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(array.type):
        return _read_ml_vectors(_without_nulls(array, column, None), column)
    if column.kind in ("text", "bytes"):
        return read_bytes(_without_nulls(array, column, fill_null))
    if column.kind == "number":
        return Rows(_to_numpy(_without_nulls(array, column, fill_null), column))
    array = _without_nulls(array, column, None)
    lengths = None
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = numbers_of(pc.list_value_length(array)).astype(np.int64)
        array = array.flatten()
    while pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    if array.null_count and fill_null is None:
        raise DataError(
            f"column {column.name!r} has nulls in its lists ({array.null_count} of {len(array)} "
            "numbers), and a tensor cannot hold nulls. Filter those rows out, or give a value for "
            f"nulls: parquet(..., fill_null={{{column.name!r}: 0}}), or functions.transform for a "
            "DataFrame"
        )
    values = _to_numpy(_without_nulls(array, column, fill_null), column)
    if column.kind == "list":
        return Rows(values, lengths)
    if lengths is not None:
        _check_lengths(lengths, column)
    return Rows(values.reshape(batch.num_rows, *column.shape))


def _check_lengths(lengths: Array, column: Column) -> None:
    other = lengths[lengths != column.width]
    if len(other):
        raise DataError(
            f"column {column.name!r} has rows of {column.width} and of {other[0]} values. The "
            f"first rows all had {column.width}, so it was taken for a vector: if lengths may "
            f"differ, name it in ragged=[{column.name!r}]"
        )


def field_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column by its dotted name; a field is null where its struct is null."""
    if name in batch.schema.names:
        return batch.column(name)
    for at in (i for i, letter in enumerate(name) if letter == "."):
        if name[:at] in batch.schema.names:
            array = batch.column(name[:at])
            for part in name[at + 1 :].split("."):
                array = pc.struct_field(array, [array.type.get_field_index(part)])
            return array
    raise KeyError(name)


def _without_nulls(array: pa.Array, column: Column, fill_null: object) -> pa.Array:
    if not array.null_count:
        return array
    if fill_null is None:
        message = (
            f"column {column.name!r} has nulls ({array.null_count} in a batch of {len(array)} "
            "rows), and a tensor cannot hold nulls. Leave those rows out"
        )
        if column.kind not in ("vector", "list"):
            message += (
                f", or give a value for nulls: fill_null={{{column.name!r}: 0}}, or df.fillna for "
                "a DataFrame (an Imputer in a Pipeline)"
            )
        raise DataError(message)
    return pc.fill_null(array, pa.scalar(fill_null, type=array.type))


def check_fill_null(name: str, type_: pa.DataType, fill_null: object) -> None:
    """Check that a value can replace the nulls of a column.

    Raises:
        DataError: it does not fit the column's type.
    """
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


def _to_numpy(array: pa.Array, column: Column) -> Array:
    type_ = array.type
    if pa.types.is_decimal(type_):
        array = array.cast(pa.float64())
    elif pa.types.is_date(type_):
        array = array.cast(pa.date32()).view(pa.int32())
    elif pa.types.is_temporal(type_):
        if pa.types.is_timestamp(type_):
            in_microseconds = pa.timestamp("us", type_.tz)
        else:
            in_microseconds = pa.time64("us") if pa.types.is_time(type_) else pa.duration("us")
        array = array.cast(in_microseconds, safe=False).view(pa.int64())
    return numbers_of(array).astype(column.dtype, copy=False)


def numbers_of(array: pa.Array) -> Array:
    """Numbers or booleans without nulls, as a read-only NumPy array. Booleans are copied.

    Arrow's own ``to_numpy`` imports pandas, which takes half a second of the first batch.
    """
    if pa.types.is_boolean(array.type):
        return numbers_of(array.cast(pa.uint8())).view(bool)
    dtype = np.dtype(_name_of(array.type))
    if not len(array):
        return np.empty(0, dtype)
    numbers = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    numbers.flags.writeable = False
    return numbers


def read_bytes(array: pa.Array) -> Rows:
    """The bytes of cells of text or bytes without nulls, as a view."""
    large = array.cast(
        pa.large_binary()
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
        else pa.large_string()
    )
    _, offsets_buffer, data = large.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, len(large) + 1, large.offset * 8)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Rows(values[offsets[0] : offsets[-1]], np.diff(offsets))


def _read_ml_vectors(array: pa.StructArray, column: Column) -> Rows:
    """Read Spark's vectors: dense ones have only values, sparse ones also indices and a size."""
    dense = numbers_of(pc.equal(array.field("type"), 1))
    values, indices = array.field("values"), array.field("indices")
    lengths = numbers_of(pc.fill_null(pc.list_value_length(values), 0)).astype(np.int64)
    sizes = numbers_of(pc.fill_null(array.field("size"), 0)).astype(np.int64)
    wide = np.where(dense, lengths, sizes)
    width = column.width if column.width > 0 else int(wide[0]) if len(wide) else 0
    _check_lengths(wide, Column(column.name, "vector", "float64", (width,)))
    matrix = np.zeros((len(array), width))
    flat = numbers_of(values.flatten())
    row = np.repeat(np.arange(len(array)), lengths)
    of_dense = dense[row]
    matrix[dense] = flat[of_dense].reshape(-1, width)
    matrix[row[~of_dense], numbers_of(indices.flatten())] = flat[~of_dense]
    return Rows(matrix)


def settle(
    column: Column, batch: pa.RecordBatch, ragged: Sequence[str] = (), *, lists: bool = True
) -> Column:
    """Decide from the first rows whether a list is a vector, and how long a vector is.

    Args:
        column: the column that the type gives.
        batch: the first rows.
        ragged: columns that stay lists.
        lists: False keeps all lists.
    """
    array = field_of(batch, column.name)
    if column.shape == (-1,):
        return Column(column.name, "vector", column.dtype, read(batch, column).values.shape[1:])
    if column.kind != "list" or not lists or column.name in ragged or not len(array):
        return column
    lengths = pc.list_value_length(array)
    shortest, longest = (pc.min(lengths).as_py(), pc.max(lengths).as_py())
    if shortest is None or shortest != longest or lengths.null_count:
        return column
    return Column(column.name, "vector", column.dtype, (longest,))
