"""The arrays and tables in what ``prepare_data`` was given, and how each kind of them travels.

An array's rows are received where they stay. Tables, pandas objects and arrays of Python objects
travel as serialized pieces, which are put together at the end.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

_SAMPLE_ROWS = 256


class Leaf(Protocol):
    """One array or table.

    Attributes:
        rows: how many it has on this rank.
    """

    rows: int

    @property
    def schema(self) -> bytes:
        """What the other ranks have to know of it; equal on all, or :meth:`conform` refuses."""

    def conform(self, others: Sequence[bytes]) -> Leaf:
        """The same as one of the kind that all ranks have.

        Args:
            others: the schemas of the ranks that have rows.

        Raises:
            ValueError: they differ; the text says in what.
        """

    def row_bytes(self) -> float:
        """About how large a row is."""


class Array:
    """A NumPy array whose items are bytes and nothing else."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self.rows = len(data)

    @property
    def schema(self) -> bytes:
        """As :class:`Leaf`."""
        return pickle.dumps((self.data.dtype, self.data.shape[1:]))

    def conform(self, others: Sequence[bytes]) -> Array:
        """As :class:`Leaf`."""
        found = [pickle.loads(other) for other in others]  # noqa: S301 - from this program's ranks
        dtype, shape = found[0]
        if all(other.kind == dtype.kind and other.kind in "US" for other, _ in found):
            dtype = np.result_type(*(other for other, _ in found))  # texts as long as the longest
        for other, trailing in found:
            if trailing != shape:
                raise ValueError(f"rows of shape {shape} and rows of shape {trailing}")
            if other != dtype and dtype.kind not in "US":
                raise ValueError(f"dtype {dtype} and dtype {other}")
        if not self.rows:
            return Array(np.empty((0, *shape), dtype))
        return self if self.data.dtype == dtype else Array(self.data.astype(dtype))

    def row_bytes(self) -> float:
        """As :class:`Leaf`."""
        items = int(np.prod(self.data.shape[1:], dtype=np.int64))
        return float(items * self.data.dtype.itemsize)


class Table:
    """What travels as serialized pieces."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.rows = len(data)

    @property
    def schema(self) -> bytes:
        """As :class:`Leaf`."""
        return bytes(self.dump(0, 0))

    def conform(self, others: Sequence[bytes]) -> Table:
        """As :class:`Leaf`."""
        found = [self.load(memoryview(other)) for other in others]
        for other in found[1:]:
            self.compare(found[0], other)
        return self if self.rows else type(self)(found[0])

    def row_bytes(self) -> float:
        """As :class:`Leaf`."""
        sample = min(self.rows, _SAMPLE_ROWS)
        return len(self.dump(0, sample)) / sample if sample else 1.0

    def part(self, begin: int, end: int) -> Any:
        """Some of the rows, as what the user gave."""
        return self.data[begin:end]

    def give(self, data: Any) -> Any:
        """What the user is given."""
        return data

    def dump(self, begin: int, end: int) -> bytes | memoryview:
        """Some of the rows as bytes."""
        return pickle.dumps(self.part(begin, end), protocol=5)

    def load(self, data: memoryview) -> Any:
        """What :meth:`dump` made."""
        return pickle.loads(data)  # noqa: S301 - from another rank of this program

    def join(self, pieces: Sequence[Any]) -> Any:
        """Pieces as one; at least one."""
        raise NotImplementedError

    def compare(self, one: Any, other: Any) -> None:
        """See that two of them can be joined.

        Raises:
            ValueError: they cannot.
        """
        raise NotImplementedError


class Objects(Table):
    """A NumPy array of Python objects."""

    def join(self, pieces: Sequence[Any]) -> Any:
        """As :class:`Table`."""
        return np.concatenate(pieces)

    def compare(self, one: Any, other: Any) -> None:
        """As :class:`Table`."""
        if one.shape[1:] != other.shape[1:]:
            raise ValueError(f"rows of shape {one.shape[1:]} and rows of shape {other.shape[1:]}")
        if one.dtype != other.dtype:
            raise ValueError(f"dtype {one.dtype} and dtype {other.dtype}")


class Frame(Table):
    """A pandas DataFrame or Series; the index comes along."""

    def part(self, begin: int, end: int) -> Any:
        """As :class:`Table`."""
        return self.data.iloc[begin:end]

    def join(self, pieces: Sequence[Any]) -> Any:
        """As :class:`Table`."""
        import pandas as pd

        return pd.concat(pieces)

    def compare(self, one: Any, other: Any) -> None:
        """As :class:`Table`."""
        if one.ndim == 1:
            types, others = {one.name: one.dtype}, {other.name: other.dtype}
        else:
            types, others = dict(one.dtypes), dict(other.dtypes)
        if list(types) != list(others):
            raise ValueError(f"columns {list(types)} and columns {list(others)}")
        for name, dtype in types.items():
            if str(dtype) != str(others[name]):
                raise ValueError(f"column {name!r} of {dtype} and of {others[name]}")


class ArrowTable(Table):
    """A pyarrow Table; what came is not copied again."""

    def part(self, begin: int, end: int) -> Any:
        """As :class:`Table`."""
        return self.data.slice(begin, end - begin)

    def dump(self, begin: int, end: int) -> memoryview:
        """As :class:`Table`."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.data.schema) as writer:
            writer.write_table(self.part(begin, end))
        return memoryview(sink.getvalue())

    def load(self, data: memoryview) -> Any:
        """As :class:`Table`."""
        import pyarrow as pa

        return pa.ipc.open_stream(pa.py_buffer(data)).read_all()

    def join(self, pieces: Sequence[Any]) -> Any:
        """As :class:`Table`."""
        import pyarrow as pa

        return pa.concat_tables(pieces)

    def compare(self, one: Any, other: Any) -> None:
        """As :class:`Table`."""
        if not one.schema.equals(other.schema):
            raise ValueError(f"columns ({_fields(one)}) and columns ({_fields(other)})")


class ArrowBatch(ArrowTable):
    """A pyarrow RecordBatch."""

    def __init__(self, data: Any) -> None:
        import pyarrow as pa

        is_batch = isinstance(data, pa.RecordBatch)
        super().__init__(pa.Table.from_batches([data]) if is_batch else data)

    def give(self, data: Any) -> Any:
        """As :class:`Table`."""
        batches = data.combine_chunks().to_batches()
        return batches[0] if batches else self._empty(data)

    def _empty(self, data: Any) -> Any:
        import pyarrow as pa

        return pa.RecordBatch.from_pylist([], schema=data.schema)


def _fields(table: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)


Rebuild = Callable[[list[Any]], Any]


def flatten(data: Any, path: str = "data") -> tuple[list[tuple[str, Leaf]], Rebuild]:
    """The arrays and tables of a structure, each with the way to it, and how to make it again.

    Raises:
        TypeError: there is something else in it; says what, and where.
    """
    if isinstance(data, dict):
        parts = [flatten(value, f"{path}[{key!r}]") for key, value in data.items()]
        keys = list(data)
        return _joined(parts, lambda values: dict(zip(keys, values, strict=True)))
    if isinstance(data, tuple | list):
        parts = [flatten(value, f"{path}[{i}]") for i, value in enumerate(data)]
        kind = type(data)
        if hasattr(data, "_fields"):
            return _joined(parts, lambda values: kind(*values))
        return _joined(parts, kind)
    leaf = _leaf(data, path)
    return [(path, leaf)], lambda values: values[0]


def _joined(
    parts: list[tuple[list[tuple[str, Leaf]], Rebuild]], make: Callable[[list[Any]], Any]
) -> tuple[list[tuple[str, Leaf]], Rebuild]:
    def rebuild(values: list[Any]) -> Any:
        made, at = [], 0
        for leaves, rebuild_part in parts:
            made.append(rebuild_part(values[at : at + len(leaves)]))
            at += len(leaves)
        return make(made)

    return [leaf for leaves, _ in parts for leaf in leaves], rebuild


def _leaf(data: Any, path: str) -> Leaf:
    pandas, pyarrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if isinstance(data, np.ndarray) and not isinstance(data, np.ma.MaskedArray):
        if data.ndim == 0:
            raise TypeError(f"{path} is an array without rows: its shape is ()")
        plain = np.asarray(data)
        return Objects(plain) if plain.dtype.hasobject else Array(plain)
    if pandas is not None and isinstance(data, pandas.DataFrame | pandas.Series):
        return Frame(data)
    if pyarrow is not None and isinstance(data, pyarrow.Table):
        return ArrowTable(data)
    if pyarrow is not None and isinstance(data, pyarrow.RecordBatch):
        return ArrowBatch(data)
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    raise TypeError(
        f"{path} is a {kind}, and prepare_data takes NumPy arrays, pandas DataFrames and Series, "
        "Arrow tables, and dicts, tuples and lists of them (of a torch tensor its .numpy()). A "
        "rank without rows gives an empty one."
    )
