"""Parquet files as the ranks read them: row groups to Arrow batches.

`listing` finds the files on the driver and counts their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from horovod_runner.data.pack.nested import stored_path
from horovod_runner.data.read.readers import ArrowReader
from horovod_runner.errors import DataError
from horovod_runner.host.folders import urls

_BATCH_BYTES = 2 << 20
_BUFFER_BYTES = 1 << 17
_MIN_ROWS, _MAX_ROWS = 1 << 8, 1 << 16


@dataclass(frozen=True)
class File:
    """One Parquet file.

    Attributes:
        names: column names in the file mapped to names in the dataset: with ``schema`` of all of
            its columns, otherwise of those that differ.
        schema: the columns of the dataset, if something other than the file says them; the file
            may lack some, and have others.
    """

    path: str  # in its filesystem's form
    constants: Mapping[str, pa.Scalar] = field(default_factory=dict)  # columns with one value
    kept: bytes | None = None  # a bit for each row: whether it counts; None: all rows count
    names: Mapping[str, str] = field(default_factory=dict)
    version: str = ""  # changes with the file, see :func:`version_of`
    schema: pa.Schema | None = None

    def fitted(self, own: pa.Schema) -> File:
        """Add columns of the dataset that the file, with its ``own``, lacks, as nulls."""
        if self.schema is None:
            return self
        known = {*self.constants, *(self.names[name] for name in own.names if name in self.names)}
        nulls = {
            field.name: pa.scalar(None, field.type)
            for field in self.schema
            if field.name not in known
        }
        return replace(self, constants={**self.constants, **nulls})

    def table(self, rows: pa.RecordBatch | pa.Table, first: int) -> pa.Table:
        """Turn rows of the file, from its row ``first`` on, into rows of the dataset."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        if self.schema is not None:
            table = table.select([name for name in table.column_names if name in self.names])
        table = table.rename_columns([self.names.get(name, name) for name in table.column_names])
        # As in Spark, the value in a path counts if a file has a column of that name, too.
        table = table.select([name for name in table.column_names if name not in self.constants])
        for name, value in self.constants.items():
            table = table.append_column(name, pa.repeat(value, len(table)))
        if self.schema is not None:
            table = _in_types_of(self.schema, table)
        if self.kept is None:
            return table
        # Starts at a whole byte: bits before the first row are cut off below.
        bits = np.unpackbits(
            np.frombuffer(self.kept, np.uint8)[first // 8 :],
            count=first % 8 + len(table),
            bitorder="little",
        )
        return table.filter(pa.array(bits[first % 8 :].astype(bool)))

    def names_in_file(self, names: Sequence[str]) -> list[str]:
        """The names that the dataset's columns have in this file, without constants."""
        renamed = {name: name_in_file for name_in_file, name in self.names.items()}
        heads = [(name.partition(".")[0], name) for name in names]
        return [
            renamed[head] + name[len(head) :] if head in renamed else name
            for head, name in heads
            if head not in self.constants
        ]


@dataclass(frozen=True)
class Files(ArrowReader):
    """Parquet files as the ranks read them."""

    filesystem: Any  # fsspec's
    files: list[File]  # sorted by path
    parts: list[list[tuple[int, list[int]]]]  # of each unit: file numbers, with row groups
    filter: Any  # which rows are read; None reads all
    filter_columns: Sequence[str]  # that the filter needs

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit, some thousand at a time."""
        paths = [stored_path(self.schema, name) for name in names]
        needed = list(dict.fromkeys([*paths, *self.filter_columns]))
        for number, groups in self.parts[unit]:
            file = self.files[number]
            self._check_version(file)
            try:
                for table in read_groups(self.filesystem, file, groups, needed):
                    kept = table if self.filter is None else table.filter(self.filter)
                    yield from kept.to_batches()
            except (pa.ArrowException, OSError, EOFError) as error:
                raise DataError(
                    f"{file.path} cannot be read (row groups {groups}): {error}. The file may be "
                    "damaged: write it again, or leave it out"
                ) from error
            self._check_version(file)

    def _check_version(self, file: File) -> None:
        if version_of(self.filesystem, file.path) != file.version:
            raise DataError(
                f"{file.path} was changed or removed since the run began, so its rows are not "
                "those that the batches were planned with. Train on a copy that nobody writes to"
            )


def _in_types_of(schema: pa.Schema, table: pa.Table) -> pa.Table:
    """Columns in a schema's order and types; nested ones keep the types of their file."""
    # Not a new table: one without columns would have no rows.
    table = table.select([name for name in schema.names if name in table.column_names])
    for at, own in enumerate(table.schema):
        type_ = schema.field(own.name).type
        if own.type != type_ and not pa.types.is_nested(type_):
            table = table.set_column(at, own.name, table.column(at).cast(type_))
    return table


def read_groups(
    filesystem: Any, file: File, groups: Sequence[int], names: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield row groups of a file, some thousand rows at a time, with columns of the dataset."""
    names = file.names_in_file(names)
    footer = footer_of(filesystem, file.path, file.version)
    starts = np.cumsum([0, *group_rows(footer)])
    with opened(filesystem, file.path) as handle:
        # Without a buffer Arrow holds whole row groups. On a remote filesystem each column would
        # fill its buffer with small requests, one after the other.
        buffer = _BUFFER_BYTES if _is_local(filesystem) else 0
        # Spark's INT96 in nanoseconds would wrap around outside of the years 1678 to 2261.
        parquet = pq.ParquetFile(
            handle, metadata=footer, buffer_size=buffer, coerce_int96_timestamp_unit="us"
        )
        for group in groups:
            first = int(starts[group])
            # Units are read by threads of our own: Arrow's threads would wait for each other.
            for batch in parquet.iter_batches(
                _batch_rows(footer.row_group(group), names),
                row_groups=[group],
                columns=names,
                use_threads=False,
            ):
                yield file.table(batch, first)
                first += batch.num_rows


@lru_cache(maxsize=64)
def footer_of(filesystem: Any, path: str, version: str) -> Any:
    """A file's metadata; cached, as it is large for a file with a thousand row groups."""
    with opened(filesystem, path) as handle:
        return pq.ParquetFile(handle).metadata


def group_rows(footer: Any) -> list[int]:
    """The number of rows of each row group."""
    return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]


def check_reachable(url: str, options: Mapping[str, Any] | None) -> None:
    """Check that a path or URL can be opened; does not look whether there is something.

    Raises:
        DataError: a package or a setting is missing, or HDFS does not answer.
    """
    with _as_data_errors():
        urls.check_reachable(url, **(options or {}))


def connect(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Connect to the file system of a path or URL; returns it and the path there.

    Raises:
        DataError: a package or a setting for such a URL is missing.
    """
    with _as_data_errors():
        return urls.file_system(url, **(options or {}))


@contextmanager
def _as_data_errors() -> Iterator[None]:
    try:
        yield
    except (ImportError, ValueError) as error:
        raise DataError(str(error)) from None


def opened(filesystem: Any, path: str) -> Any:
    """Open a file for reading, with Arrow's own faster code for local files."""
    return pa.OSFile(path, "rb") if _is_local(filesystem) else filesystem.open(path, "rb")


def _is_local(filesystem: Any) -> bool:
    return "file" in filesystem.protocol


def _batch_rows(group: Any, names: Sequence[str]) -> int:
    """The number of rows that take about two megabytes."""
    heads = {name.partition(".")[0] for name in names}
    columns = (group.column(number) for number in range(group.num_columns))
    size = sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] in heads
    )
    return int(min(max(_BATCH_BYTES * group.num_rows // max(1, size), _MIN_ROWS), _MAX_ROWS))


def version_of(filesystem: Any, path: str) -> str:
    """A text that changes when a file does, from its filesystem's metadata; empty if it is gone."""
    try:
        filesystem.invalidate_cache(filesystem._parent(path))
        info = filesystem.info(path)
    except FileNotFoundError:
        return ""
    known = (
        *("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "md5Hash"),
        "modification_time",  # HDFS's
    )
    return repr([(name, str(info[name])) for name in known if name in info])
