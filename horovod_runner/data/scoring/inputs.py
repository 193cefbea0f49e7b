"""The inputs of a model: Arrow rows become arrays, by the code that feeds training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from horovod_runner.common.spark_session import quoted
from horovod_runner.data.feed.fields import Field, fields_of, names_of
from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.pack import arrow_rows
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack.columns import Column, Columns, Rows
from horovod_runner.data.pack.nested import column_at, tops
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

_BYTES_AT_ONCE: Final = 8 << 20


@dataclass(frozen=True)
class Inputs:
    """Which columns a model gets, and as what; pickled to Spark's Python workers.

    Attributes:
        settled: whether ``columns`` are decided for good. Otherwise the first rows that a Python
            worker sees decide whether a list is a vector, and how long a vector is.
    """

    options: FeedOptions
    columns: Mapping[str, Column]  # that are read, as their types say, by name
    fill_null: Mapping[str, Any] = field(default_factory=dict)  # what replaces nulls, by column
    ragged: Sequence[str] = ()  # lists that stay lists, even if the first rows have one length
    settled: bool = False

    @classmethod
    def of(
        cls,
        schema: pa.Schema,
        options: FeedOptions,
        fill_null: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
    ) -> Inputs:
        """The inputs that a user wants of some columns.

        Raises:
            DataError: a column does not exist or cannot become a tensor, or ``fill_null`` does not
                fit one.
            TypeError: ``columns`` is neither a list of names nor a mapping.
            ValueError: ``columns`` is empty.
        """
        available = column_types.columns_of(schema)
        # Each image is scored once: there is nothing to cache.
        images = {
            name: replace(image, cache=False) for name, image in (options.images or {}).items()
        }
        options = replace(options, images=images or None)
        names = names_of(available, options)
        arrow_rows.check_fill_nulls(schema, available, fill_null or {})
        columns = {column.name: column for name in names for column in available.find(name)}
        fields_of(Columns(columns), options)
        settled = all(column.is_settled for column in columns.values())
        return cls(options, columns, dict(fill_null or {}), tuple(ragged), settled)

    @property
    def names(self) -> list[str]:
        """Names of the columns that are read; fields of a struct have dotted names."""
        return list(self.columns)

    @cached_property
    def fields(self) -> list[Field]:
        """The parts of a batch."""
        return fields_of(Columns(self.columns), self.options)

    def columns_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that are read; a part of a struct or a map becomes a column."""
        arrays = [column_at(batch, name) for name in self.names]
        return pa.RecordBatch.from_arrays(arrays, self.names)

    def settle(self, batch: pa.RecordBatch) -> Inputs:
        """The same inputs with the columns decided by the first rows."""
        columns = {
            name: arrow_rows.settle(column, [_present(batch, name)], self.ragged)
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, settled=batch.num_rows > 0)

    def rows_at_once(self, batch_size: int) -> int:
        """How many rows are read at a time: some batches of narrow rows, one of wide ones."""
        sizes = []
        for part in self.fields:
            if not part.is_uniform:
                return batch_size
            numbers = int(np.prod([size or 1 for size in part.row_shape]))
            sizes.append(numbers * np.dtype(part.result_dtype).itemsize)
        batches = _BYTES_AT_ONCE // max(1, sum(sizes) * batch_size)
        return batch_size * max(1, batches)

    def batches(self, rows: pa.RecordBatch, batch_size: int) -> Iterator[dict[str, Any]]:
        """The parts of some rows, in batches; see :meth:`arrays`."""
        whole = self._read(rows)
        for start in range(0, rows.num_rows, batch_size):
            part = {name: values[start : start + batch_size] for name, values in whole.items()}
            yield self._transformed(part)

    def arrays(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """The parts of a batch: arrays of shape (rows, ...), or lists for text and ragged columns.

        Raises:
            DataError: a cell cannot become a number: it is null, or a damaged image, or has another
                length.
        """
        return self._transformed(self._read(batch))

    def _read(self, batch: pa.RecordBatch) -> dict[str, Any]:
        rows: dict[str, Rows] = {
            name: arrow_rows.read(batch, column, self.fill_null.get(name))
            for name, column in self.columns.items()
        }
        return {part.name: part.of(rows) for part in self.fields}

    def _transformed(self, parts: dict[str, Any]) -> dict[str, Any]:
        if self.options.transform is None:
            return parts
        try:
            changed = self.options.transform(parts)
        except Exception as error:  # whatever the user's code raises
            raise DataError(
                f"transform failed on a batch of {self.describe(parts)}: {type(error).__name__}: "
                f"{error}. It gets a dict of NumPy arrays, and lists for text and ragged columns"
            ) from error
        if not isinstance(changed, Mapping):
            raise DataError(
                "transform must return a dict of arrays by the names of the inputs, not "
                f"{type(changed).__name__}"
            )
        return dict(changed)

    def zeros(self, rows: int) -> dict[str, Any] | None:
        """A batch of zeros, for a model that is tried without data; None if shapes are unknown."""
        parts: dict[str, Any] = {}
        for part in self.fields:
            shape = part.row_shape
            if any(size is None or size < 0 for size in shape):
                return None
            if part.single and part.image is None and not part.columns[0].is_fixed:
                return None
            parts[part.name] = np.zeros((rows, *(size or 0 for size in shape)), part.result_dtype)
        return self._transformed(parts)

    def expressions(self, dataframe: DataFrame) -> list[SparkColumn]:
        """The columns that are read, as expressions of Spark, in order."""
        types = {field.name: field.dataType for field in dataframe.schema}
        return [expression(name, types) for name in self.columns]

    def describe(self, parts: Mapping[str, Any]) -> str:
        """The parts of a batch with their types and shapes, for error messages."""
        return ", ".join(
            f"{name}: {value.dtype} {value.shape}"
            if isinstance(value, np.ndarray)
            else f"{name}: {len(value)} rows"
            for name, value in parts.items()
        )


def _present(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """The rows in which a column is not null: a null says nothing about the length of a vector."""
    column = batch.column(name)
    return batch.filter(column.is_valid()) if column.null_count else batch


def expression(name: str, types: Mapping[str, Any]) -> SparkColumn:
    """A column by its dotted name, as an expression of Spark; ``types`` are the columns' types."""
    from pyspark.sql import functions

    top = tops(types, name)[0]
    return _inside(functions.col(quoted(top)), types[top], name[len(top) + 1 :])


def _inside(column: SparkColumn, type_: Any, path: str) -> SparkColumn:
    """A field of structs or lists of structs, or the value of a map's key."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, MapType, StructType

    if not path:
        return column
    if isinstance(type_, ArrayType):
        return functions.transform(column, lambda each: _inside(each, type_.elementType, path))
    if isinstance(type_, MapType):
        value = type_.valueType
        for field in value.fields if isinstance(value, StructType) else ():
            if path.endswith(f".{field.name}"):
                key, path = path.removesuffix(f".{field.name}"), field.name
                break
        else:
            key, path = path, ""
        chosen = functions.lit(key).cast(type_.keyType)
        return _inside(functions.element_at(column, chosen), value, path)
    field = tops(type_.names, path)[0]
    return _inside(column.getField(field), type_[field].dataType, path[len(field) + 1 :])
