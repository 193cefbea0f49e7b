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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from horovod_runner.data.pack.nested import (
    ANY_KEY,
    innermost,
    is_list,
    is_ml_vector,
    leaves,
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

    Attributes:
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
        """The columns of a name: one, the value of a map's key, or all fields of a struct."""
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
            if is_around or (f".{ANY_KEY}" in other and matches(other, name)):
                raise DataError(why)
        fields = [column for path, column in self.items() if path.startswith(f"{name}.")]
        if not fields:
            raise DataError(
                f"there is no column {name!r}: the columns are {', '.join(self.listed)}"
            )
        return fields

    def all(self) -> list[str]:
        """The names of all columns."""
        for name in [*self.refused, *self.maps]:
            try:
                self.find(name)
            except DataError as error:
                raise DataError(
                    f"{error}. Without columns= all columns are taken: name those that you need"
                ) from None
        return list(self)


def column_of(name: str, type_: pa.DataType) -> Column:
    """Map an Arrow type to a column; a vector of unknown length gets the shape (-1,)."""
    shown = type_
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    dtype = _number_dtype(type_)
    if dtype is not None:
        return Column(name, "number", dtype)
    if (cells := cells_dtype(type_)) is not None:
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
        held = _number_dtype(inner) or cells_dtype(inner)
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
    """Note in a schema why columns cannot be used, by name; it may lack these columns."""
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


def name_of(type_: pa.DataType) -> str:
    """NumPy's name of a type of whole or floating-point numbers."""
    return _FLOATS.get(str(type_), str(type_))


def _number_dtype(type_: pa.DataType) -> str | None:
    """NumPy's name of the type that one number per row becomes; None if it is not a number."""
    if pa.types.is_boolean(type_):
        return "bool"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return name_of(type_)
    if pa.types.is_decimal(type_):
        return "float64"
    if pa.types.is_date(type_):
        return "int32"
    if pa.types.is_timestamp(type_) or pa.types.is_time(type_) or pa.types.is_duration(type_):
        return "int64"
    return None


def cells_dtype(type_: pa.DataType) -> str | None:
    """Return "str" or "bytes" for a type of text or bytes; otherwise None."""
    if str(type_) in ("string", "large_string", "string_view"):
        return "str"
    is_bytes = str(type_) in ("binary", "large_binary", "binary_view")
    return "bytes" if is_bytes or pa.types.is_fixed_size_binary(type_) else None
