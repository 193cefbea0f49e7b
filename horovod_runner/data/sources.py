"""What a user can give as a dataset, and how it is made ready on the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from horovod_runner.data import files
from horovod_runner.data.readers import ArrowReader, Table
from horovod_runner.data.shard import Reader
from horovod_runner.data.spill import Spilled
from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.data.files import Filter


Prepared: TypeAlias = Reader | Spilled


class Source(ABC):
    """A dataset by its description; nothing is read before a run needs it."""

    @abstractmethod
    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """Look at the data.

        Args:
            name: what the user calls it, for messages.
            shared: a folder that this process and all ranks see; None where there is none.

        Raises:
            DataError: it cannot be read, or a column cannot become a tensor.
        """


class parquet(Source):  # noqa: N801 - reads as a call
    """Parquet files, which the ranks read themselves.

    Args:
        path: a file, a folder (hive partitions become columns), a glob pattern, or several of
            these; on anything that fsspec knows: ``s3://``, ``hdfs://``, ``gs://``, ``abfs://``.
        columns: which are read; None for all.
        filter: which rows are read: an expression of ``pyarrow.dataset``, or tuples as pyarrow
            takes them: ``[("year", ">=", 2024)]``.
        fill: what stands for nulls, by column.
        ragged: lists that are no vectors, though the first of them may be as long as each other.
        storage_options: for fsspec.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        fill: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._columns = columns
        self._filter = filter
        self._fill = fill or {}
        self._ragged = ragged
        self._options = storage_options or {}

    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """See :class:`Source`."""
        return _checked(
            name,
            files.find(
                self._path,
                columns=self._columns,
                filter_=self._filter,
                storage_options=self._options,
                fill=self._fill,
                ragged=self._ragged,
            ),
        )


class delta(Source):  # noqa: N801 - reads as a call
    """A Delta table, which the ranks read themselves; takes deltalake.

    Deleted rows and renamed columns are taken into account. The version is settled when the run
    begins: what is written meanwhile is not seen.

    Args:
        path: the table's folder or URL.
        version: of the table; None for the newest.
        columns: see :class:`parquet`.
        filter: see :class:`parquet`.
        fill: see :class:`parquet`.
        ragged: see :class:`parquet`.
        storage_options: for deltalake and for fsspec.
    """

    def __init__(
        self,
        path: str,
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        fill: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._version = version
        self._options: dict[str, Any] = {
            "columns": columns,
            "filter_": filter,
            "fill": fill,
            "ragged": ragged,
            "storage_options": storage_options,
        }

    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """See :class:`Source`."""
        from horovod_runner.data import delta_table

        return _checked(name, delta_table.find(self._path, version=self._version, **self._options))


class _Table(Source):
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """See :class:`Source`."""
        table = self._table.unify_dictionaries()
        return _checked(
            name,
            Table(table=table, schema=table.schema, units=[len(table)], fingerprint=_digest(table)),
        )


class Frame(Source):
    """A Spark DataFrame."""

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame

    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """See :class:`Source`."""
        from horovod_runner.data import staging

        try:
            if shared is None:
                return Spilled(name, staging.arrow_schema(self.frame))
            return staging.stage(self.frame, shared)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None


def source_of(value: object) -> Source | None:
    """The source that an argument of ``run`` is; None if it is something else."""
    if isinstance(value, Source):
        return value
    if isinstance(value, pa.Table):
        return _Table(value)
    module, _, name = f"{type(value).__module__}.{type(value).__qualname__}".rpartition(".")
    if name == "DataFrame" and module.startswith("pandas."):
        return _Table(pa.Table.from_pandas(value, preserve_index=False))
    if name == "DataFrame" and module.startswith("pyspark.sql."):
        return Frame(value)
    return None


def frames_of(sources: Mapping[str, Source]) -> dict[str, DataFrame]:
    """The Spark DataFrames among sources."""
    return {name: source.frame for name, source in sources.items() if isinstance(source, Frame)}


def _checked(name: str, reader: ArrowReader) -> ArrowReader:
    """Name columns that cannot become tensors before anything is launched."""
    try:
        if not reader.columns:
            raise DataError("it has no columns")
        reader.settle(list(reader.columns))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return reader


def _digest(table: pa.Table) -> str:
    import hashlib

    digest = hashlib.blake2b(repr((table.schema, len(table))).encode(), digest_size=8)
    for batch in table.to_batches():
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is not None:
                    digest.update(memoryview(buffer)[: 1 << 16])
    return digest.hexdigest()
