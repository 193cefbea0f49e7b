"""Dotted names: columns inside structs, lists of structs and maps.

struct            "point.x" is the field x
list of structs   "items.price" is a list: the field price of each element
map               "prefs.age" is the value of the key "age", null where a row lacks the key
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Stands for any key in the name of a map's values: "prefs.*".
ANY_KEY: Final = "*"
_ML_VECTOR: Final = ("type", "size", "indices", "values")


def is_ml_vector(type_: pa.DataType) -> bool:
    """Whether it is the struct in which Spark ML stores a vector."""
    return pa.types.is_struct(type_) and tuple(field.name for field in type_) == _ML_VECTOR


def is_list(type_: pa.DataType) -> bool:
    """Whether it is a list, of fixed size or not."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(type_) for is_kind in kinds)


def innermost(type_: pa.DataType) -> pa.DataType:
    """What lists of lists hold in the end."""
    while is_list(type_):
        type_ = type_.value_type
    return type_


def leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """All columns by name: fields in place of structs, and "m.*" for the values of a map "m"."""
    types: dict[str, pa.DataType] = {}
    for field in schema:
        _add_leaves(field.name, field.type, types, ())
    return types


def _add_leaves(
    name: str, type_: pa.DataType, types: dict[str, pa.DataType], lists: Sequence[pa.DataType]
) -> None:
    """Add a column or its parts; ``lists`` are the types of the lists around it."""
    if pa.types.is_struct(type_) and not is_ml_vector(type_):
        for field in type_:
            _add_leaves(f"{name}.{field.name}", field.type, types, lists)
        return
    inner = innermost(type_)
    if is_list(type_) and pa.types.is_struct(inner) and not is_ml_vector(inner):
        _add_leaves(name, type_.value_type, types, [*lists, type_])
    elif pa.types.is_map(type_) and not lists and not name.endswith(f".{ANY_KEY}"):
        _add_leaves(f"{name}.{ANY_KEY}", type_.item_type, types, lists)
    else:
        for outer in reversed(lists):
            type_ = _list_like(outer, type_)
        types[name] = type_


def _list_like(outer: pa.DataType, inner: pa.DataType) -> pa.DataType:
    """The type of lists as in ``outer``, which hold ``inner``."""
    if pa.types.is_fixed_size_list(outer):
        return pa.list_(inner, outer.list_size)
    return pa.large_list(inner) if pa.types.is_large_list(outer) else pa.list_(inner)


def matches(template: str, name: str) -> bool:
    """Whether a name is that of a map's key: "prefs.age" for "prefs.*"."""
    head, tail = template.split(f".{ANY_KEY}", 1)
    longest = len(name) - len(head) - len(tail)
    return longest > 1 and name.startswith(f"{head}.") and name.endswith(tail)


def column_at(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column by its dotted name; null where a struct around it is null."""
    for top in tops(batch.schema.names, name):
        return _at(batch.column(batch.schema.names.index(top)), name[len(top) + 1 :])
    raise KeyError(name)


def tops(names: Iterable[str], name: str) -> list[str]:
    """The names with which a dotted name begins, longest first."""
    heads = (top for top in names if name == top or name.startswith(f"{top}."))
    return sorted(heads, key=len, reverse=True)


def _at(array: pa.Array, path: str) -> pa.Array:
    if not path:
        return array
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if is_list(array.type):
        array = _trimmed(array)
        return _with_values(array, _at(array.values, path))
    if pa.types.is_map(array.type):
        key, rest = _split_key(array.type.item_type, path)
        return _at(_value_of(array, key), rest)
    names = [field.name for field in array.type] if pa.types.is_struct(array.type) else []
    for field in tops(names, path):
        return _at(pc.struct_field(array, [names.index(field)]), path[len(field) + 1 :])
    raise KeyError(path)


def _trimmed(array: pa.Array) -> pa.Array:
    """The same lists without the values of rows that a slice left out."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        if array.null_count or len(array.values) == len(array) * size:
            return array
        values = array.values.slice(array.offset * size, len(array) * size)
        return pa.FixedSizeListArray.from_arrays(values, size)
    start, end = (array.offsets[at].as_py() for at in (0, len(array)))
    if end - start == len(array.values):
        return array
    return type(array).from_arrays(
        pc.subtract(array.offsets, start),
        array.values.slice(start, end - start),
        mask=array.is_null() if array.null_count else None,
    )


def _with_values(array: pa.Array, values: pa.Array) -> pa.Array:
    """The same lists with other values, one in place of each."""
    own = 1 if pa.types.is_fixed_size_list(array.type) else 2
    return pa.Array.from_buffers(
        _list_like(array.type, values.type),
        len(array),
        array.buffers()[:own],
        array.null_count,
        array.offset,
        children=[values],
    )


def _split_key(item_type: pa.DataType, path: str) -> tuple[str, str]:
    """A key of a map, and the path inside its value: a key may hold dots."""
    for tail in sorted((n[1:] for n in leaves(pa.schema([("v", item_type)]))), key=len)[::-1]:
        if tail and path.endswith(tail) and len(path) > len(tail):
            return path[: -len(tail)], tail[1:]
    return path, ""


def _value_of(array: pa.MapArray, key: str) -> pa.Array:
    """The value of a key in each row; null where the row or the key is missing."""
    offsets = _integers(array.offsets)
    start = int(offsets[0])
    keys = array.keys.slice(start, int(offsets[-1]) - start).cast(pa.string())
    places = _integers(pc.indices_nonzero(pc.equal(keys, key))).astype(np.int64) + start
    rows = np.searchsorted(offsets, places, "right") - 1
    inside = (rows >= 0) & (rows < len(array))
    index = np.full(len(array), -1, np.int64)
    index[rows[inside]] = places[inside]
    if array.null_count:
        index[_integers(pc.indices_nonzero(array.is_null()))] = -1
    return array.items.take(pa.array(index, mask=index < 0))


def _integers(array: pa.Array) -> Any:
    dtype = np.dtype(str(array.type))
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def stored_path(schema: pa.Schema, name: str) -> str:
    """The part of a column that can be read by itself: a field of a struct, or all of a list."""
    heads = tops(schema.names, name)
    if not heads:
        return name
    path, type_ = heads[0], schema.field(heads[0]).type
    while pa.types.is_struct(type_) and not is_ml_vector(type_):
        names = [field.name for field in type_]
        inside = tops(names, name[len(path) + 1 :])
        if not inside:
            break
        path, type_ = f"{path}.{inside[0]}", type_[names.index(inside[0])].type
    return path


def map_values(array: pa.Array, change: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Change what lists of lists hold in the end."""
    if is_list(array.type):
        array = _trimmed(array)
        return _with_values(array, map_values(array.values, change))
    return change(array)
