"""Parquet files: which there are, how many rows they have, and how they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from horovod_runner.data.readers import ArrowReader
from horovod_runner.errors import DataError

_BATCH_ROWS = 1 << 13
_UNITS = 64  # enough for all ranks of a host to take part
Filter: TypeAlias = Any | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        path: as its filesystem knows it.
        version: changes with the file.
        constants: the columns that its path tells.
    """

    path: str
    version: str
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class Files(ArrowReader):
    """Parquet files as the ranks read them.

    Attributes:
        filesystem: fsspec's.
        files: in the order of their names.
        parts: for each unit, the row groups it is made of: the file's number and the groups'.
        filter: which rows are read; None for all.
    """

    filesystem: Any
    files: list[File]
    parts: list[list[tuple[int, list[int]]]]
    filter: Any

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a unit, some thousand at a time.

        Raises:
            DataError: a file cannot be read, or is not what it was when the run began.
        """
        for number, groups in self.parts[unit]:
            file = self.files[number]
            self._check(file)
            try:
                yield from self._read(file, groups, names)
            except (pa.ArrowException, OSError, EOFError) as error:
                raise DataError(
                    f"{file.path} cannot be read (row groups {groups}): {error}"
                ) from error
            self._check(file)

    def _check(self, file: File) -> None:
        if version_of(self.filesystem, file.path) != file.version:
            raise DataError(
                f"{file.path} was changed or removed since the run began: its rows would no longer "
                "be those that were planned with. Train on a copy that nobody writes to"
            )

    def _read(
        self, file: File, groups: list[int], names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        own: list[str] | None = None  # a filter may need any
        if self.filter is None:
            own = [name for name in names if name.partition(".")[0] not in file.constants]
        with self.filesystem.open(file.path, "rb") as handle:
            parquet = pq.ParquetFile(handle)
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=groups, columns=own):
                table = _with_constants(batch, file.constants)
                if self.filter is not None:
                    table = table.filter(self.filter)
                yield from table.to_batches()


def version_of(filesystem: Any, path: str) -> str:
    """What changes when a file does, as far as its filesystem tells; empty if it is gone."""
    try:
        filesystem.invalidate_cache(filesystem._parent(path))
        info = filesystem.info(path)
    except FileNotFoundError:
        return ""
    known = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "md5Hash")
    return repr([(name, str(info[name])) for name in known if name in info])


def find(
    path: str | Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    filter_: Filter | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    ragged: Sequence[str] = (),
) -> Files:
    """Look at all files.

    Args:
        path: a file, a folder (hive partitions become columns), a glob pattern, or several; on
            anything fsspec knows.
        columns: which are wanted; None for all.
        filter_: an expression of pyarrow.dataset, or tuples as pyarrow.parquet takes them.
        storage_options: for fsspec.
        fill: for nulls, by column.
        ragged: lists that are no vectors.

    Raises:
        DataError: there are no such files, or they cannot be read or do not fit together.
    """
    import fsspec

    paths = [path] if isinstance(path, str) else list(path)
    filesystem, _ = fsspec.core.url_to_fs(paths[0], **(storage_options or {}))
    found = []
    for one in paths:
        stripped = filesystem._strip_protocol(one)
        if any(letter in stripped for letter in "*?["):
            found += filesystem.glob(stripped)
        elif filesystem.isdir(stripped):
            found += _files_in(filesystem, stripped)
        elif filesystem.exists(stripped):
            found.append(stripped)
    if not found:
        raise DataError(f"there is no Parquet file at {', '.join(paths)}")
    expression = pq.filters_to_expression(filter_) if isinstance(filter_, list | tuple) else filter_
    looked = _look(filesystem, sorted(found), expression)
    schema = _only(looked.schema, columns)
    return replace(looked, schema=schema, fill=fill or {}, ragged=ragged)


def _files_in(filesystem: Any, folder: str) -> list[str]:
    def hidden(path: str) -> bool:
        parts = path[len(folder) :].split("/")
        return any(part.startswith(("_", ".")) for part in parts)

    return [path for path in filesystem.find(folder) if not hidden(path)]


def _look(filesystem: Any, paths: list[str], expression: ds.Expression | None) -> Files:
    partitions = [_partitions(path) for path in paths]
    types = _partition_types(partitions)
    files, groups, schema = [], [], None
    for number, path in enumerate(paths):
        constants = {
            name: int(partitions[number][name]) if types[name] == pa.int64() else value
            for name, value in partitions[number].items()
        }
        version = version_of(filesystem, path)
        try:
            with filesystem.open(path, "rb") as handle:
                parquet = pq.ParquetFile(handle)
                metadata, own = parquet.metadata, parquet.schema_arrow.remove_metadata()
                rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                if expression is not None:
                    rows = _count_matching(parquet, expression, constants)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
        for name in constants:
            own = own.append(pa.field(name, types[name]))
        if schema is not None and own != schema:
            raise DataError(f"{path} has other columns than {paths[0]}: {_difference(schema, own)}")
        schema = own
        files.append(File(path, version, constants))
        groups += [(number, group, count) for group, count in enumerate(rows)]
    assert schema is not None  # noqa: S101 - there is a file
    parts, units = _units(groups)
    described = repr([(file.path.rpartition("/")[2], file.version) for file in files])
    described += repr(groups) + str(expression)
    fingerprint = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
    return Files(
        filesystem,
        files,
        parts,
        expression,
        schema=schema,
        units=units,
        fingerprint=fingerprint,
    )


def _partitions(path: str) -> dict[str, str]:
    """What a path of hive's form tells: ``.../year=2024/...``."""
    from urllib.parse import unquote

    pairs = [part.partition("=") for part in path.split("/")[:-1] if "=" in part]
    return {name: unquote(value) for name, _, value in pairs}


def _partition_types(partitions: Sequence[Mapping[str, str]]) -> dict[str, pa.DataType]:
    def is_int(text: str) -> bool:
        return text.lstrip("-").isdigit()

    names = {name for found in partitions for name in found}
    return {
        name: pa.int64()
        if all(is_int(found.get(name, "")) for found in partitions)
        else pa.string()
        for name in names
    }


def _with_constants(batch: pa.RecordBatch, constants: Mapping[str, Any]) -> pa.Table:
    table = pa.Table.from_batches([batch])
    for name, value in constants.items():
        type_ = pa.int64() if isinstance(value, int) else pa.string()
        table = table.append_column(name, pa.repeat(pa.scalar(value, type_), len(table)))
    return table


def _count_matching(
    parquet: pq.ParquetFile, expression: ds.Expression, constants: Mapping[str, Any]
) -> list[int]:
    counts = []
    for group in range(parquet.metadata.num_row_groups):
        count = 0
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group]):
            count += _with_constants(batch, constants).filter(expression).num_rows
        counts.append(count)
    return counts


def _units(
    groups: Sequence[tuple[int, int, int]],
) -> tuple[list[list[tuple[int, list[int]]]], list[int]]:
    """Consecutive row groups together, in units of about as many rows."""
    target = -(-sum(rows for _, _, rows in groups) // _UNITS)
    parts: list[list[tuple[int, list[int]]]] = []
    units: list[int] = []
    for file, group, rows in groups:
        if not rows:
            continue
        if not units or units[-1] >= target:
            parts.append([])
            units.append(0)
        if parts[-1] and parts[-1][-1][0] == file:
            parts[-1][-1][1].append(group)
        else:
            parts[-1].append((file, [group]))
        units[-1] += rows
    return parts, units


def _only(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return schema
    names = {name.partition(".")[0] for name in columns}
    missing = names - set(schema.names)
    if missing:
        raise DataError(
            f"there is no column {', '.join(map(repr, sorted(missing)))}: there are "
            f"{', '.join(schema.names)}"
        )
    return pa.schema([field for field in schema if field.name in names])


def _difference(first: pa.Schema, other: pa.Schema) -> str:
    odd = [f"{f.name} is {f.type}" for f in other if f not in first]
    missing = [f"{f.name} ({f.type}) is missing" for f in first if f.name not in other.names]
    return "; ".join([*odd, *missing]) or "they come in another order"
