"""The arrays and tables in the argument of ``prepare_data``, and how they are sent.

Rows of an array are received directly into the result. Tables, pandas objects and arrays of Python
objects are sent as serialized pieces, which are joined at the end.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_SAMPLE_ROWS = 256


class _Rows:
    """The rows of this rank, and their number."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.rows = len(data)


class Array(_Rows):
    """A NumPy array of plain items, without Python objects."""

    @property
    def schema(self) -> bytes:
        """A description for the other ranks; :meth:`conform` compares those of all ranks."""
        return pickle.dumps((self.data.dtype, self.data.shape[1:]))

    def conform(self, others: Sequence[bytes]) -> Array:
        """Return this leaf in the type that all ranks have in common; ``others`` have rows.

        Raises:
            ValueError: the schemas differ; the text says how.
        """
        schemas = [pickle.loads(other) for other in others]  # noqa: S301 - from this program
        dtype, shape = schemas[0]
        if dtype.kind in "US" and all(other.kind == dtype.kind for other, _ in schemas):
            dtype = np.result_type(*(other for other, _ in schemas))  # the width of the widest text
        for other, trailing in schemas:
            if trailing != shape:
                raise ValueError(f"rows of shape {shape} and rows of shape {trailing}")
            if other != dtype and not (other.kind == dtype.kind and dtype.kind in "US"):
                raise ValueError(f"dtype {dtype} and dtype {other}")
        if not self.rows:
            return Array(np.empty((0, *shape), dtype))
        return self if self.data.dtype == dtype else Array(self.data.astype(dtype))

    def row_bytes(self) -> float:
        """Return the approximate size of a row in bytes."""
        items = int(np.prod(self.data.shape[1:], dtype=np.int64))
        return float(items * self.data.dtype.itemsize)


class Serialized(_Rows):
    """Base class of data that are sent as serialized pieces; see :class:`Array`."""

    @property
    def schema(self) -> bytes:
        return bytes(self.dump(0, 0))

    def conform(self, others: Sequence[bytes]) -> Serialized:
        empty_tables = [self.load(memoryview(other)) for other in others]
        for other in empty_tables[1:]:
            self.compare(empty_tables[0], other)
        return self if self.rows else type(self)(empty_tables[0])

    def row_bytes(self) -> float:
        sample = min(self.rows, _SAMPLE_ROWS)
        return len(self.dump(0, sample)) / sample if sample else 1.0

    def part(self, begin: int, end: int) -> Any:
        """Return rows ``begin`` to ``end`` in the user's type."""
        return self.data[begin:end]

    def result(self, data: Any) -> Any:
        """Convert joined pieces to the type that ``prepare_data`` returns."""
        return data

    def dump(self, begin: int, end: int) -> bytes | memoryview:
        """Serialize rows ``begin`` to ``end``."""
        return pickle.dumps(self.part(begin, end), protocol=5)

    def load(self, data: memoryview) -> Any:
        """Deserialize the result of :meth:`dump`."""
        return pickle.loads(data)  # noqa: S301 - from another rank of this program

    def join(self, pieces: Sequence[Any]) -> Any:
        """Join pieces; at least one."""
        raise NotImplementedError

    def compare(self, one: Any, other: Any) -> None:
        """Raise ValueError if two pieces cannot be joined."""
        raise NotImplementedError


Leaf = Array | Serialized


class Objects(Serialized):
    """A NumPy array of Python objects."""

    def join(self, pieces: Sequence[Any]) -> Any:
        return np.concatenate(pieces)

    def compare(self, one: Any, other: Any) -> None:
        if one.shape[1:] != other.shape[1:]:
            raise ValueError(f"rows of shape {one.shape[1:]} and rows of shape {other.shape[1:]}")
        if one.dtype != other.dtype:
            raise ValueError(f"dtype {one.dtype} and dtype {other.dtype}")


class Frame(Serialized):
    """A pandas DataFrame or Series, with its index."""

    def part(self, begin: int, end: int) -> Any:
        return self.data.iloc[begin:end]

    def join(self, pieces: Sequence[Any]) -> Any:
        import pandas as pd

        return pd.concat(pieces)

    def compare(self, one: Any, other: Any) -> None:
        if one.ndim == 1:
            types, others = {one.name: one.dtype}, {other.name: other.dtype}
        else:
            types, others = dict(one.dtypes), dict(other.dtypes)
        if list(types) != list(others):
            raise ValueError(f"columns {list(types)} and columns {list(others)}")
        for name, dtype in types.items():
            if str(dtype) != str(others[name]):
                raise ValueError(f"column {name!r} of {dtype} and of {others[name]}")


class ArrowTable(Serialized):
    """A pyarrow Table; received pieces are not copied."""

    def part(self, begin: int, end: int) -> Any:
        return self.data.slice(begin, end - begin)

    def dump(self, begin: int, end: int) -> memoryview:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.data.schema) as writer:
            writer.write_table(self.part(begin, end))
        return memoryview(sink.getvalue())

    def load(self, data: memoryview) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(pa.py_buffer(data)).read_all()

    def join(self, pieces: Sequence[Any]) -> Any:
        import pyarrow as pa

        return pa.concat_tables(pieces)

    def compare(self, one: Any, other: Any) -> None:
        if not one.schema.equals(other.schema):
            raise ValueError(f"columns ({_fields(one)}) and columns ({_fields(other)})")


class ArrowBatch(ArrowTable):
    """A pyarrow RecordBatch."""

    def __init__(self, data: Any) -> None:
        import pyarrow as pa

        is_batch = isinstance(data, pa.RecordBatch)
        super().__init__(pa.Table.from_batches([data]) if is_batch else data)

    def result(self, data: Any) -> Any:
        import pyarrow as pa

        batches = data.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=data.schema)


def _fields(table: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)


def flatten(data: Any, path: str = "data") -> Iterator[tuple[str, Leaf]]:
    """Split dicts, tuples and lists into their arrays and tables, each with its path.

    Raises:
        TypeError: they contain something else; the text says what and where.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            yield from flatten(value, f"{path}[{key!r}]")
    elif isinstance(data, tuple | list):
        for number, value in enumerate(data):
            yield from flatten(value, f"{path}[{number}]")
    else:
        yield path, _leaf(data, path)


def rebuild(data: Any, leaves: Iterator[Any]) -> Any:
    """Make a structure like ``data`` with new leaves, in the order of :func:`flatten`."""
    if isinstance(data, dict):
        return {key: rebuild(value, leaves) for key, value in data.items()}
    if isinstance(data, tuple | list):
        values = [rebuild(value, leaves) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return next(leaves)


def _leaf(data: Any, path: str) -> Leaf:
    pandas, pyarrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if isinstance(data, np.ndarray) and not isinstance(data, np.ma.MaskedArray):
        if data.ndim == 0:
            raise TypeError(f"{path} is an array without rows: its shape is (). Reshape it to (1,)")
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
        f"{path} has the type {kind}. prepare_data accepts NumPy arrays, pandas DataFrames and "
        "Series, Arrow tables, and dicts, tuples and lists of them. Convert a torch tensor with "
        ".numpy(); on a rank without rows pass an empty one."
    )
