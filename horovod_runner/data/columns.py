"""Columns: what each Arrow type becomes, and what cannot become a tensor.

numbers, bool               as they are
decimal                     float64
date                        int32, days since 1970
timestamp, time, duration   int64, microseconds (timestamps since 1970, UTC)
string, binary              text and bytes
fixed-size list             a vector, or more dimensions where lists are nested
list                        a vector where all rows are as long, else ragged
Spark ML vector             a float64 vector; sparse ones become dense
struct                      its fields, by dotted names
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


@dataclass(frozen=True)
class Column:
    """One column of a dataset.

    Attributes:
        name: dotted for a field of a struct.
        kind: a "list" has rows of any length.
        dtype: NumPy's name of the numbers' type; "uint8" for text and bytes.
        shape: of a row; empty but for vectors.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers a row has, where all rows have as many."""
        return int(np.prod(self.shape))

    @property
    def is_settled(self) -> bool:
        """Whether the type alone tells what it is: a list may be a vector."""
        return self.kind != "list" and -1 not in self.shape

    @property
    def is_fixed(self) -> bool:
        """Whether all rows have as many numbers."""
        return self.kind in ("number", "vector")


@dataclass(frozen=True)
class Rows:
    """Some rows of one column.

    Attributes:
        values: shape (rows, *column.shape) where that is fixed, else all rows' values in a row.
        lengths: of the rows, where they may differ.
    """

    values: Array
    lengths: Array | None = None

    def part(self, start: int, end: int) -> Rows:
        """Some of them."""
        if self.lengths is None:
            return Rows(self.values[start:end])
        first, last = int(self.lengths[:start].sum()), int(self.lengths[:end].sum())
        return Rows(self.values[first:last], self.lengths[start:end])

    def views(self) -> list[memoryview]:
        """Each row's values, where their lengths differ."""
        assert self.lengths is not None  # noqa: S101 - they differ
        ends = np.cumsum(self.lengths).tolist()
        whole = self.values.data
        return [whole[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """All columns by name, structs taken apart."""
    found: dict[str, pa.DataType] = {}
    for field in schema:
        _take_apart(field.name, field.type, found)
    return found


def _take_apart(name: str, type_: pa.DataType, found: dict[str, pa.DataType]) -> None:
    if pa.types.is_struct(type_) and not _is_ml_vector(type_):
        for field in type_:
            _take_apart(f"{name}.{field.name}", field.type, found)
    else:
        found[name] = type_


def column_of(name: str, type_: pa.DataType) -> Column:
    """The column that a type becomes; a vector of unknown length has the shape (-1,).

    Raises:
        DataError: it cannot become a tensor.
    """
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    dtype = _number(type_)
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
    dtype = _number(inner)
    if shape and dtype is not None:
        return Column(name, "vector", dtype, tuple(shape))
    if (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and (
        dtype := _number(type_.value_type)
    ) is not None:
        return Column(name, "list", dtype)
    raise DataError(
        f"column {name!r} of type {type_} cannot become a tensor: leave it out, or turn it into "
        "numbers, lists of numbers, text or bytes first"
    )


def _is_ml_vector(type_: pa.DataType) -> bool:
    return pa.types.is_struct(type_) and tuple(field.name for field in type_) == _ML_VECTOR


def _number(type_: pa.DataType) -> str | None:
    """NumPy's name for what a type of one number a row becomes."""
    if pa.types.is_boolean(type_):
        return "bool"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return str(np.dtype(type_.to_pandas_dtype()).name)
    if pa.types.is_decimal(type_):
        return "float64"
    if pa.types.is_date(type_):
        return "int32"
    if pa.types.is_timestamp(type_) or pa.types.is_time(type_) or pa.types.is_duration(type_):
        return "int64"
    return None


def read(batch: pa.RecordBatch, column: Column, fill: object = None) -> Rows:
    """One column's rows of a record batch.

    Args:
        batch: where from.
        column: which one.
        fill: for nulls.

    Raises:
        DataError: there are nulls and nothing to fill them with, or rows that are not as long as
            the column's.
    """
    array = _find(batch, column.name)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(array.type):
        return _read_ml_vectors(_without_nulls(array, column, None), column)
    if column.kind in ("text", "bytes"):
        return _read_bytes(_without_nulls(array, column, fill))
    if column.kind == "number":
        return Rows(_to_numpy(_without_nulls(array, column, fill), column))
    array = _without_nulls(array, column, None)
    lengths = None
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = pc.list_value_length(array).to_numpy().astype(np.int64)
        array = array.flatten()
    while pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    if array.null_count and fill is None:
        raise DataError(
            f"column {column.name!r} has nulls in its lists ({array.null_count} of {len(array)} "
            "numbers): a tensor has none. Filter them out before, or say what stands for them: "
            f"parquet(..., fill={{{column.name!r}: 0}}), or functions.transform for a DataFrame"
        )
    values = _to_numpy(_without_nulls(array, column, fill), column)
    if column.kind == "list":
        return Rows(values, lengths)
    if lengths is not None:
        _refuse_other_lengths(lengths, column)
    return Rows(values.reshape(batch.num_rows, *column.shape))


def _refuse_other_lengths(lengths: Array, column: Column) -> None:
    other = lengths[lengths != column.width]
    if len(other):
        raise DataError(
            f"column {column.name!r} has rows of {column.width} and of {other[0]} values, and the "
            f"first ones all had {column.width}: name it in ragged=[{column.name!r}]"
        )


def _find(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column by its dotted name; a field is null where its struct is."""
    if name in batch.schema.names:
        return batch.column(name)
    for at in (i for i, letter in enumerate(name) if letter == "."):
        if name[:at] in batch.schema.names:
            array = batch.column(name[:at])
            for part in name[at + 1 :].split("."):
                array = pc.struct_field(array, [array.type.get_field_index(part)])
            return array
    raise KeyError(name)


def _without_nulls(array: pa.Array, column: Column, fill: object) -> pa.Array:
    if not array.null_count:
        return array
    if fill is None:
        told = (
            f"column {column.name!r} has nulls ({array.null_count} in a batch of {len(array)} "
            "rows): a tensor has none. Leave those rows out"
        )
        if column.kind not in ("vector", "list"):
            told += (
                f", or say what stands for them: fill={{{column.name!r}: 0}}, or df.fillna for a "
                "DataFrame"
            )
        raise DataError(told)
    return pc.fill_null(array, pa.scalar(fill, type=array.type))


def check_fill(name: str, type_: pa.DataType, fill: object) -> None:
    """See that a value can stand for a column's nulls.

    Raises:
        DataError: it cannot.
    """
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    while not pa.types.is_primitive(type_) and hasattr(type_, "value_type"):
        type_ = type_.value_type
    try:
        value = pa.scalar(fill, type=type_).as_py()
        if isinstance(value, int) and value != fill:  # Arrow cuts off what is behind the point
            raise ValueError("it is no whole number")
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"fill says that {fill!r} stands for nulls of column {name!r}, which is {type_}: "
            f"{error}"
        ) from error


def _to_numpy(array: pa.Array, column: Column) -> Array:
    type_ = array.type
    if pa.types.is_decimal(type_):
        array = array.cast(pa.float64())
    elif pa.types.is_date64(type_):
        array = array.cast(pa.date32())
    elif pa.types.is_timestamp(type_):
        array = array.cast(pa.timestamp("us", type_.tz), safe=False)
    elif pa.types.is_time(type_):
        array = array.cast(pa.time64("us"), safe=False)
    elif pa.types.is_duration(type_):
        array = array.cast(pa.duration("us"), safe=False)
    if pa.types.is_date(array.type):
        array = array.view(pa.int32())
    elif pa.types.is_temporal(array.type):
        array = array.view(pa.int64())
    numbers: Array = array.to_numpy(zero_copy_only=False)
    return numbers.astype(column.dtype, copy=False)


def _read_bytes(array: pa.Array) -> Rows:
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
    """Spark's vectors: dense ones have values alone, sparse ones indices and a size."""
    dense = pc.equal(array.field("type"), 1).to_numpy(zero_copy_only=False)
    values, indices = array.field("values"), array.field("indices")
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy().astype(np.int64)
    sizes = pc.fill_null(array.field("size"), 0).to_numpy().astype(np.int64)
    wide = np.where(dense, lengths, sizes)
    width = column.width if column.width > 0 else int(wide[0]) if len(wide) else 0
    _refuse_other_lengths(wide, Column(column.name, "vector", "float64", (width,)))
    matrix = np.zeros((len(array), width))
    flat = values.flatten().to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(array)), lengths)
    of_dense = dense[row]
    matrix[dense] = flat[of_dense].reshape(-1, width)
    matrix[row[~of_dense], indices.flatten().to_numpy(zero_copy_only=False)] = flat[~of_dense]
    return Rows(matrix)


def settle(
    column: Column, batch: pa.RecordBatch, ragged: Sequence[str] = (), *, lists: bool = True
) -> Column:
    """What a column is, now that its first rows are there: a list may be a vector.

    Args:
        column: as its type tells.
        batch: the first rows.
        ragged: columns that stay lists.
        lists: False lets all stay lists.
    """
    array = _find(batch, column.name)
    if column.shape == (-1,):
        return Column(column.name, "vector", column.dtype, read(batch, column).values.shape[1:])
    if column.kind != "list" or not lists or column.name in ragged or not len(array):
        return column
    lengths = pc.list_value_length(array)
    shortest, longest = (pc.min(lengths).as_py(), pc.max(lengths).as_py())
    if shortest is None or shortest != longest or lengths.null_count:
        return column
    return Column(column.name, "vector", column.dtype, (longest,))


def choose(schema: pa.Schema) -> dict[str, Column]:
    """All columns, by name.

    Raises:
        DataError: one cannot become a tensor.
    """
    return {name: column_of(name, type_) for name, type_ in leaves(schema).items()}
