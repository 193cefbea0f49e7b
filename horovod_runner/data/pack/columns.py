"""Column types: maps Arrow types to NumPy arrays and refuses types that cannot become tensors.

numbers, bool               unchanged
decimal                     float64
date                        int32, days since 1970
timestamp, time, duration   int64, microseconds (timestamps since 1970, UTC)
string, binary              text and bytes
fixed-size list             a vector; nested lists give more dimensions
list                        a vector if all rows have the same length, otherwise ragged
lists of lists              the same with more dimensions
list of text or bytes       a list for each row
Spark ML vector             a float64 vector; sparse ones become dense
struct, list of structs     its fields, with dotted names
map                         the values of a key, with its dotted name

A column of another type is refused when somebody asks for it, and only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from horovod_runner.data.pack.nested import (
    ANY_KEY,
    column_at,
    innermost,
    is_list,
    is_ml_vector,
    leaves,
    map_values,
    matches,
)
from horovod_runner.errors import DataError

Kind = Literal["number", "vector", "list", "text", "bytes", "object"]
Array = npt.NDArray[Any]
Sizes = list[tuple[int, int]]
_REFUSED: Final = b"horovod_runner.refused"
_decode_refused: Final = msgspec.json.Decoder(dict[str, str]).decode
# NumPy's names of types that Arrow names otherwise.
_FLOATS: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Column:
    """Name and type of one column.

    Attributes:
        name: dotted for a field of a struct.
        kind: the rows of a "list", "text", "bytes" or "object" column differ in length. An "object"
            is a list of lists, or of text or bytes, and is stored as MessagePack.
        dtype: NumPy's name of the number type; "uint8" for text and bytes. For an "object" of what
            the lists hold in the end: numbers, "str" or "bytes".
        shape: shape of one row; empty unless ``kind`` is "vector" or "object". -1 is a size that
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
        return self.is_ragged_text or (self.kind not in ("list", "object") and -1 not in self.shape)

    @property
    def is_ragged_text(self) -> bool:
        """Whether rows are lists of text or bytes."""
        return self.kind == "object" and self.dtype in ("str", "bytes")

    @property
    def stored_dtype(self) -> str:
        """NumPy's name of the type in which its values are stored."""
        return "uint8" if self.kind == "object" else self.dtype

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


class Columns(dict[str, Column]):
    """The columns of a dataset that can become tensors, by name.

    Args:
        columns: the columns.
        refused: why others cannot become tensors, by name.
        maps: what the values of a map become, by "m.*" for a map "m".
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        refused: Mapping[str, str] | None = None,
        maps: Mapping[str, Column] | None = None,
    ) -> None:
        super().__init__(columns)
        self.refused = dict(refused or {})
        self.maps = dict(maps or {})

    def changed(
        self, columns: Iterable[Column] = (), refused: Mapping[str, str] | None = None
    ) -> Columns:
        """The same columns, some of them known better, or refused."""
        both = {**self, **{column.name: column for column in columns}}
        refused = {**self.refused, **(refused or {})}
        kept = {name: column for name, column in both.items() if name not in refused}
        return Columns(kept, refused, self.maps)

    @property
    def listed(self) -> list[str]:
        """The names to show: keys of a map are "m.*"."""
        return [*self, *self.maps]

    def find(self, name: str) -> list[Column]:
        """The columns of a name: one, the value of a map's key, or all fields of a struct.

        Raises:
            DataError: there is none, or one cannot become a tensor.
        """
        if name in self:
            return [self[name]]
        if name in self.refused:
            raise DataError(self.refused[name])
        for template, column in self.maps.items():
            head = template.partition(f".{ANY_KEY}")[0]
            if name in (template, head) or head.startswith(f"{name}."):
                raise DataError(
                    f"column {head!r} is a map, which has other keys in each row: ask for the "
                    f"values of a key by name, {template.replace(ANY_KEY, 'KEY')!r}, or for several"
                )
            if matches(template, name):
                return [replace(column, name=name)]
        for other, why in self.refused.items():
            is_around = name.startswith(f"{other}.") or other.startswith(f"{name}.")
            if is_around or _is_key_of(other, name):
                raise DataError(why)
        fields = [column for path, column in self.items() if path.startswith(f"{name}.")]
        if not fields:
            raise DataError(
                f"there is no column {name!r}: the columns are {', '.join(self.listed)}"
            )
        return fields

    def all(self) -> list[str]:
        """The names of all columns.

        Raises:
            DataError: one cannot become a tensor, or is a map.
        """
        for name in [*self.refused, *self.maps]:
            try:
                self.find(name)
            except DataError as error:
                raise DataError(
                    f"{error}. Without columns= all columns are taken: name those that you need"
                ) from None
        return list(self)


def _is_key_of(template: str, name: str) -> bool:
    """Whether a name is that of a key of a map whose values cannot become tensors."""
    return f".{ANY_KEY}" in template and matches(template, name)


def column_of(name: str, type_: pa.DataType) -> Column:
    """Map an Arrow type to a column; a vector of unknown length gets the shape (-1,).

    Raises:
        DataError: the type cannot become a tensor.
    """
    shown = type_
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    dtype = _number_dtype(type_)
    if dtype is not None:
        return Column(name, "number", dtype)
    if (cells := _cells_dtype(type_)) is not None:
        return Column(name, "text" if cells == "str" else "bytes", "uint8")
    if is_ml_vector(type_):
        return Column(name, "vector", "float64", (-1,))
    shape: list[int] = []
    inner = type_
    while pa.types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    dtype = _number_dtype(inner)
    if shape and dtype is not None:
        return Column(name, "vector", dtype, tuple(shape))
    if is_list(type_):
        inner = innermost(type_)
        held = _number_dtype(inner) or _cells_dtype(inner)
        if held is not None and not is_list(type_.value_type) and held not in ("str", "bytes"):
            return Column(name, "list", held)
        if held is not None:
            return Column(name, "object", held, (-1,) * _depth(type_))
    raise DataError(
        f"column {name!r} of type {shown} cannot become a tensor: leave it out, or turn it into "
        "numbers, lists of numbers, text or bytes first"
    )


def _depth(type_: pa.DataType) -> int:
    return 1 + _depth(type_.value_type) if is_list(type_) else 0


def refusing(schema: pa.Schema, refused: Mapping[str, str]) -> pa.Schema:
    """Note in a schema why columns cannot be used, in it or left out of it, by name."""
    noted = {**refused_in(schema), **refused}
    return schema.with_metadata({_REFUSED: msgspec.json.encode(noted)} if noted else None)


def refused_in(schema: pa.Schema) -> dict[str, str]:
    """What :func:`refusing` has noted."""
    noted = (schema.metadata or {}).get(_REFUSED)
    return {} if noted is None else _decode_refused(noted)


def columns_of(schema: pa.Schema) -> Columns:
    """Map all columns of a schema, by name."""
    columns: dict[str, Column] = {}
    maps: dict[str, Column] = {}
    odd = refused_in(schema)
    for name, type_ in leaves(schema).items():
        try:
            column = column_of(name, type_)
        except DataError as error:
            odd[name] = str(error)
            continue
        (maps if name.endswith(f".{ANY_KEY}") or f".{ANY_KEY}." in name else columns)[name] = column
    return Columns(columns, odd, maps).changed()


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


def _cells_dtype(type_: pa.DataType) -> str | None:
    """Return "str" or "bytes" for a type of text or bytes; otherwise None."""
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or str(type_) == "string_view":
        return "str"
    if (
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_fixed_size_binary(type_)
        or str(type_) == "binary_view"
    ):
        return "bytes"
    return None


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


def _check_lengths(lengths: Array, column: Column, level: int = 0, first: int = 0) -> None:
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


def check_fill_nulls(schema: pa.Schema, columns: Columns, fill_null: Mapping[str, object]) -> None:
    """Check that values can replace the nulls of columns.

    Raises:
        DataError: there is no such column, or a value does not fit its type.
    """
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
    dtype = np.dtype(_name_of(array.type))
    if not len(array):
        return np.empty(0, dtype)
    numbers = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    numbers.flags.writeable = False
    return numbers


def read_bytes(array: pa.Array) -> Rows:
    """The bytes of cells of text or bytes without nulls, as a view."""
    is_text = _cells_dtype(array.type) == "str"
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    large = array.cast(pa.large_string() if is_text else pa.large_binary())
    _, offsets_buffer, data = large.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, len(large) + 1, large.offset * 8)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Rows(values[offsets[0] : offsets[-1]], np.diff(offsets))


def _vector_sizes(array: pa.StructArray) -> Array:
    """The size of each of Spark's vectors."""
    dense = numbers_of(pc.equal(array.field("type"), 1))
    lengths = numbers_of(pc.fill_null(pc.list_value_length(array.field("values")), 0))
    sizes = numbers_of(pc.fill_null(array.field("size"), 0))
    return np.where(dense, lengths, sizes).astype(np.int64)


def has_sparse(array: pa.Array) -> bool:
    """Whether some of Spark's vectors are sparse."""
    return bool(pc.any(pc.equal(array.field("type"), 0)).as_py())


def _read_ml_vectors(array: pa.StructArray, column: Column, first: int = 0) -> Rows:
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
    """Decide from some rows whether a list is a vector, and how long a vector is.

    Args:
        column: the column that the type gives.
        batches: the first rows, or all.
        ragged: columns that stay lists.
    """
    if column.is_settled or (column.kind in ("list", "object") and column.name in ragged):
        return column
    sizes = [sizes_of(_plain(column_at(batch, column.name))) for batch in batches if batch.num_rows]
    if column.shape == (-1,) and column.kind == "vector":
        width = sizes[0][0][0] if sizes else 0
        return Column(column.name, "vector", column.dtype, (width,))
    return settled(column, joined(sizes)) if sizes else column
