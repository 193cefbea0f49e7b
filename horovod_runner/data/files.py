"""Parquet files: which there are, how many rows they have, and how they are read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from horovod_runner.data.readers import ArrowReader
from horovod_runner.errors import DataError

_BATCH_BYTES = 2 << 20
_BUFFER_BYTES = 1 << 17
_MIN_ROWS, _MAX_ROWS = 1 << 8, 1 << 16
_UNITS = 64  # enough for all ranks of a host to take part
Filter: TypeAlias = Any | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        path: as its filesystem knows it.
        constants: columns that are not in it, of one value each.
        kept: which of its rows count, as packed bits; None for all.
        names: what its columns are called in the dataset, where that is not their name in it.
        version: changes with the file; told by :func:`look`.
    """

    path: str
    constants: Mapping[str, pa.Scalar] = field(default_factory=dict)
    kept: bytes | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    def table(self, rows: pa.RecordBatch | pa.Table, first: int) -> pa.Table:
        """Rows of the file as the dataset has them.

        Args:
            rows: of the file.
            first: the number of the first of them in the file.
        """
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        table = table.rename_columns([self.names.get(name, name) for name in table.column_names])
        for name, value in self.constants.items():
            table = table.append_column(name, pa.repeat(value, len(table)))
        if self.kept is None:
            return table
        # Bits before the first one would have to be cut off.
        bits = np.unpackbits(
            np.frombuffer(self.kept, np.uint8)[first // 8 :],
            count=first % 8 + len(table),
            bitorder="little",
        )
        return table.filter(pa.array(bits[first % 8 :].astype(bool)))


@dataclass(frozen=True)
class Files(ArrowReader):
    """Parquet files as the ranks read them.

    Attributes:
        filesystem: fsspec's.
        files: in the order of their names.
        parts: for each unit, the row groups it is made of: the file's number and the groups'.
        filter: which rows are read; None for all.
        filter_columns: what has to be read to tell.
    """

    filesystem: Any
    files: list[File]
    parts: list[list[tuple[int, list[int]]]]
    filter: Any
    filter_columns: Sequence[str]

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a unit, some thousand at a time.

        Raises:
            DataError: a file cannot be read, or is not what it was when the run began.
        """
        needed = [*names, *(name for name in self.filter_columns if name not in names)]
        for number, groups in self.parts[unit]:
            file = self.files[number]
            self._check(file)
            try:
                for table in _read(self.filesystem, file, groups, _stored(file, needed)):
                    kept = table if self.filter is None else table.filter(self.filter)
                    yield from kept.to_batches()
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


def _stored(file: File, names: Sequence[str]) -> list[str]:
    """What some columns are called in a file."""
    there = {own: name for name, own in file.names.items()}
    heads = [(name.partition(".")[0], name) for name in names]
    return [
        there[head] + name[len(head) :] if head in there else name
        for head, name in heads
        if head not in file.constants
    ]


def _read(
    filesystem: Any, file: File, groups: Sequence[int], names: Sequence[str]
) -> Iterator[pa.Table]:
    """Row groups of a file, some thousand rows at a time."""
    footer = _footer(filesystem, file.path, file.version)
    starts = np.cumsum([0, *_group_rows(footer)])
    with _opened(filesystem, file.path) as handle:
        # Without a buffer Arrow holds whole row groups; one for each column, from far away, would
        # ask for small pieces in turn.
        buffer = _BUFFER_BYTES if _is_local(filesystem) else 0
        parquet = pq.ParquetFile(handle, metadata=footer, buffer_size=buffer)
        for group in groups:
            first = int(starts[group])
            # A thread of ours reads each unit: Arrow's own would wait for each other.
            for batch in parquet.iter_batches(
                _batch_rows(footer.row_group(group), names),
                row_groups=[group],
                columns=names,
                use_threads=False,
            ):
                yield file.table(batch, first)
                first += batch.num_rows


@lru_cache(maxsize=64)
def _footer(filesystem: Any, path: str, version: str) -> Any:
    """A file's metadata, which a thousand row groups make large."""
    with _opened(filesystem, path) as handle:
        return pq.ParquetFile(handle).metadata


def _opened(filesystem: Any, path: str) -> Any:
    """A file to be read; Arrow does so faster by itself where it can."""
    return pa.OSFile(path, "rb") if _is_local(filesystem) else filesystem.open(path, "rb")


def _is_local(filesystem: Any) -> bool:
    return "file" in filesystem.protocol


def _batch_rows(group: Any, names: Sequence[str]) -> int:
    """As many rows as take about two megabytes."""
    heads = {name.partition(".")[0] for name in names}
    columns = (group.column(number) for number in range(group.num_columns))
    size = sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] in heads
    )
    return int(min(max(_BATCH_BYTES * group.num_rows // max(1, size), _MIN_ROWS), _MAX_ROWS))


def _group_rows(footer: Any) -> list[int]:
    return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]


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
    """Find all files, and look at them.

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
    found: dict[str, dict[str, str]] = {}  # what their paths tell
    for one in paths:
        stripped = filesystem._strip_protocol(one)
        if any(letter in stripped for letter in "*?["):
            found.update((file, {}) for file in filesystem.glob(stripped))
        elif filesystem.isdir(stripped):
            files = [file for file in filesystem.find(stripped) if not _is_hidden(file, stripped)]
            found.update((file, _partitions(file[len(stripped) :])) for file in files)
        elif filesystem.exists(stripped):
            found[stripped] = {}
    if not found:
        raise DataError(f"there is no Parquet file at {', '.join(paths)}")
    names = {name for partitions in found.values() for name in partitions}
    types = {name: _type_of([told.get(name, "") for told in found.values()]) for name in names}
    described = [
        File(
            file,
            {name: pa.scalar(text).cast(types[name]) for name, text in sorted(found[file].items())},
        )
        for file in sorted(found)
    ]
    return chosen(look(filesystem, described, filter_), columns, fill, ragged)


def chosen(
    files: Files,
    columns: Sequence[str] | None,
    fill: Mapping[str, Any] | None,
    ragged: Sequence[str],
) -> Files:
    """The same files, as the user wants them read."""
    schema = _only(files.schema, columns)
    return replace(files, schema=schema, fill=fill or {}, ragged=ragged)


def _is_hidden(file: str, folder: str) -> bool:
    """Spark's and Petastorm's own files beside the data."""
    return any(part.startswith(("_", ".")) for part in file[len(folder) :].split("/"))


def _partitions(path: str) -> dict[str, str]:
    """What a path of hive's form tells: ``.../year=2024/...``."""
    pairs = [part.partition("=") for part in path.split("/")[:-1] if "=" in part]
    return {name: unquote(value) for name, _, value in pairs}


def _type_of(texts: Sequence[str]) -> pa.DataType:
    return pa.int64() if all(text.lstrip("-").isdigit() for text in texts) else pa.string()


def look(filesystem: Any, files: Sequence[File], filter_: Filter | None = None) -> Files:
    """Look at some files: what is in them, and how many rows.

    Raises:
        DataError: one cannot be read, or does not fit to the others.
    """
    expression = _expression(filter_)
    groups, schema, looked = [], None, []
    needed: list[str] = []
    for number, file in enumerate(files):
        file = replace(file, version=version_of(filesystem, file.path))  # noqa: PLW2901
        try:
            footer = _footer(filesystem, file.path, file.version)
            rows = _group_rows(footer)
            plain = footer.schema.to_arrow_schema().remove_metadata()
            own = file.table(plain.empty_table(), 0).schema
            needed = _needed(expression, own)
            if expression is not None or file.kept is not None:
                possible = _possible(filesystem, file, len(rows), expression, own)
                rows = [
                    _count(filesystem, file, group, expression, needed) if group in possible else 0
                    for group in range(len(rows))
                ]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.path} cannot be read as Parquet: {error}") from error
        if schema is not None and own != schema:
            raise DataError(
                f"{file.path} has other columns than {files[0].path}: {_difference(schema, own)}"
            )
        schema = own
        looked.append(file)
        groups += [(number, group, count) for group, count in enumerate(rows)]
    assert schema is not None  # noqa: S101 - there is a file
    parts, units = _units(groups)
    told = repr([(file.path.rpartition("/")[2], file.version) for file in looked])
    told += repr(groups) + str(expression)
    fingerprint = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    return Files(
        filesystem,
        looked,
        parts,
        expression,
        needed,
        schema=schema,
        units=units,
        fingerprint=fingerprint,
    )


def _expression(filter_: Filter | None) -> pc.Expression | None:
    if filter_ is None or isinstance(filter_, pc.Expression):
        return filter_
    try:
        return pq.filters_to_expression(filter_)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the filter {filter_!r} is neither an expression of pyarrow.dataset nor tuples as "
            f"pyarrow takes them, such as [('year', '>=', 2024)]: {error}"
        ) from error


def _needed(expression: pc.Expression | None, schema: pa.Schema) -> list[str]:
    """The columns that a filter may name: an expression tells none but by what it prints."""
    told = "" if expression is None else str(expression)
    if "FieldPath(" in told:  # by its number
        return list(schema.names)
    return [name for name in schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", told)]


def _possible(
    filesystem: Any, file: File, groups: int, expression: pc.Expression | None, schema: pa.Schema
) -> set[int]:
    """The row groups that may have rows which a filter lets through, as statistics tell."""
    if expression is None:
        return set(range(groups))
    import pyarrow.dataset as ds

    constants = ds.scalar(True)
    for name, value in file.constants.items():
        constants &= ds.field(name) == value
    try:
        schema.empty_table().filter(expression)
        if file.names:  # statistics know columns by their names in the file
            return set(range(groups))
        with _opened(filesystem, file.path) as handle:
            whole = ds.ParquetFileFormat().make_fragment(handle, partition_expression=constants)
            return {group.id for group in whole.subset(expression, schema=schema).row_groups}
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the filter {expression} cannot be applied to {', '.join(schema.names)} of "
            f"{file.path}: {error}"
        ) from error


def _count(
    filesystem: Any,
    file: File,
    group: int,
    expression: pc.Expression | None,
    names: Sequence[str],
) -> int:
    """How many rows of a group count."""
    tables = _read(filesystem, file, [group], _stored(file, names))
    return sum(len(table if expression is None else table.filter(expression)) for table in tables)


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
    if isinstance(columns, str):
        raise TypeError(f"columns takes a list of names of columns, not {columns!r}")
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
