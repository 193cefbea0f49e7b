"""Finds Parquet files on the driver: their schema, and the rows that pass a filter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypedDict
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack.layout import fingerprint_of
from horovod_runner.data.pack.nested import leaves
from horovod_runner.data.read.files import (
    File,
    Files,
    connect,
    footer_of,
    group_rows,
    opened,
    read_groups,
    version_of,
)
from horovod_runner.errors import DataError

_UNITS = 64  # enough for all ranks of a host to take part in packing
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # Hive's and Spark's word for null in a path
Filter: TypeAlias = Any | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]


class ReadingArguments(TypedDict, total=False):
    """Arguments that all kinds of files have; `sources.parquet` describes them."""

    columns: Sequence[str] | None
    filter: Filter | None
    fill_null: Mapping[str, Any] | None
    ragged: Sequence[str]
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """:class:`ReadingArguments` with their defaults."""

    columns: Sequence[str] | None = None
    filter: Filter | None = None
    fill_null: Mapping[str, Any] | None = None
    ragged: Sequence[str] = ()
    storage_options: Mapping[str, Any] | None = None


def find(path: str | Sequence[str], reading: Reading) -> Files:
    """Find Parquet files, on any filesystem of fsspec, and count their rows.

    A path is a file, a folder (Hive partitions become columns), a glob pattern, or several.
    """
    paths = [path] if isinstance(path, str) else list(path)
    filesystem, _ = connect(paths[0], reading.storage_options)
    # The values in the path of each file; None is null.
    partitions: dict[str, dict[str, str | None]] = {}
    for pattern in paths:
        stripped = filesystem._strip_protocol(pattern)
        if any(letter in stripped for letter in "*?["):
            partitions.update((file, {}) for file in filesystem.glob(stripped))
        elif filesystem.isdir(stripped):
            files = [file for file in filesystem.find(stripped) if not _is_hidden(file, stripped)]
            partitions.update((file, _partitions(file[len(stripped) :])) for file in files)
        elif filesystem.exists(stripped):
            partitions[stripped] = {}
    if not partitions:
        raise DataError(
            f"there is no Parquet file at {', '.join(paths)}: check the path, and that this "
            "machine can read it"
        )
    names = {name for values in partitions.values() for name in values}
    types = {name: _type_of([v.get(name, "") for v in partitions.values()]) for name in names}
    described = [
        File(
            file,
            {
                name: pa.scalar(text, pa.string()).cast(types[name])
                for name, text in sorted(values.items())
            },
        )
        for file, values in sorted(partitions.items())
    ]
    return inspect(filesystem, described, reading)


def _is_hidden(file: str, folder: str) -> bool:
    """Whether Spark or Petastorm wrote the file beside the data; ``_date=...`` is a partition."""
    return any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in file[len(folder) :].split("/")
    )


def _partitions(path: str) -> dict[str, str | None]:
    """The values in a path of Hive's form: ``.../year=2024/...``."""
    pairs = [part.partition("=") for part in path.split("/")[:-1] if "=" in part]
    return {
        unquote(name): None if value == _NULL_PARTITION else unquote(value)
        for name, _, value in pairs
    }


def _type_of(texts: Sequence[str | None]) -> pa.DataType:
    known = [text for text in texts if text is not None]
    is_whole = all(
        re.fullmatch("-?[0-9]+", text) and -(2**63) <= int(text) < 2**63 for text in known
    )
    return pa.int64() if known and is_whole else pa.string()


def inspect(
    filesystem: Any,
    files: Sequence[File],
    reading: Reading,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Files:
    """Read the schema of some files, and count the rows that pass the filter.

    ``refused`` has the reasons why columns cannot be read, by name.
    """
    expression = _expression(reading.filter)
    groups, schema, inspected = [], None, []
    needed: list[str] = []
    refused = dict(refused)
    for number, file in enumerate(files):
        file = replace(file, version=version_of(filesystem, file.path))  # noqa: PLW2901
        try:
            footer = footer_of(filesystem, file.path, file.version)
            rows = group_rows(footer)
            plain = footer.schema.to_arrow_schema().remove_metadata()
            file = file.fitted(plain)  # noqa: PLW2901
            file_schema = file.table(plain.empty_table(), 0).schema
            needed = _needed(expression, file_schema)
            if expression is not None or file.kept is not None:
                possible = _possible(filesystem, file, len(rows), expression, file_schema)
                rows = [0] * len(rows)
                for group in possible:
                    tables = read_groups(filesystem, file, [group], needed)
                    kept = tables if expression is None else (t.filter(expression) for t in tables)
                    rows[group] = sum(map(len, kept))
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file.path} cannot be read as Parquet: {error}. If it is another kind of file, "
                "name the Parquet files by a pattern: 'folder/*.parquet'"
            ) from error
        for name in _with_other_fields(file.schema, file_schema):
            refused.setdefault(
                name,
                f"column {name!r} has other fields in {file.path} than in the table: fields were "
                "added or dropped later. Leave it out with columns=, or pass a Spark DataFrame",
            )
        if schema is None:
            schema = file_schema
        elif file_schema != schema:
            for name, difference in _differences(schema, file_schema).items():
                refused.setdefault(
                    name,
                    f"{file.path} has other columns than {files[0].path}: {difference}. Write the "
                    "files with one schema, or pass them as datasets of their own",
                )
        inspected.append(file)
        groups += [(number, group, count) for group, count in enumerate(rows)]
    assert schema is not None  # noqa: S101 - there is a file
    parts, units = _units(groups)
    content = repr([(file.path.rpartition("/")[2], file.version) for file in inspected])
    content += repr(groups) + str(expression)
    return Files(
        filesystem,
        inspected,
        parts,
        expression,
        needed,
        schema=_only(schema, reading.columns, refused),
        units=units,
        fingerprint=fingerprint_of(content),
        fill_null=reading.fill_null or {},
        ragged=reading.ragged,
    )


def _with_other_fields(schema: pa.Schema | None, own: pa.Schema) -> list[str]:
    """The nested columns whose fields in a file are not those that its table says."""
    return [
        field.name
        for field in schema or ()
        if leaves(pa.schema([field])).keys() != leaves(pa.schema([own.field(field.name)])).keys()
    ]


def _expression(filter_: Filter | None) -> pc.Expression | None:
    if filter_ is None or isinstance(filter_, pc.Expression):
        return filter_
    try:
        return pq.filters_to_expression(filter_)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the filter {filter_!r} is neither an expression of pyarrow.dataset nor tuples as in "
            f"pyarrow.parquet, such as [('year', '>=', 2024)]: {error}"
        ) from error


def _needed(expression: pc.Expression | None, schema: pa.Schema) -> list[str]:
    """The columns that a filter may use; an expression shows them only in its text."""
    text = "" if expression is None else str(expression)
    if "FieldPath(" in text:  # a column by its number
        return list(schema.names)
    return [name for name in schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def _possible(
    filesystem: Any, file: File, groups: int, expression: pc.Expression | None, schema: pa.Schema
) -> set[int]:
    """The row groups that may have rows that pass the filter, by their statistics."""
    if expression is None:
        return set(range(groups))
    import pyarrow.dataset as ds

    constants = ds.scalar(True)
    for name, value in file.constants.items():
        column = ds.field(name)
        constants &= column == value if value.is_valid else column.is_null()
    try:
        schema.empty_table().filter(expression)
        # Statistics use the names in the file.
        if any(name != name_in_file for name_in_file, name in file.names.items()):
            return set(range(groups))
        with opened(filesystem, file.path) as handle:
            whole = ds.ParquetFileFormat().make_fragment(handle, partition_expression=constants)
            return {group.id for group in whole.subset(expression, schema=schema).row_groups}
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the filter {expression} cannot be applied to {', '.join(schema.names)} of "
            f"{file.path}: {error}. Check its column names and the types of its values"
        ) from error


def _units(
    groups: Sequence[tuple[int, int, int]],
) -> tuple[list[list[tuple[int, list[int]]]], list[int]]:
    """Join consecutive row groups (file number, group number, rows) into units of similar size.

    Returns:
        For each unit its row groups by file, and its rows.
    """
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


def _only(
    schema: pa.Schema, columns: Sequence[str] | None, refused: Mapping[str, str]
) -> pa.Schema:
    if columns is None:
        usable = pa.schema([field for field in schema if field.name not in refused])
        return column_types.refusing(usable, refused)
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of column names, not {columns!r}")
    names = {name if name in schema.names else name.partition(".")[0] for name in columns}
    if asked := sorted(names & set(refused)):
        raise DataError(refused[asked[0]])
    missing = names - set(schema.names)
    if missing:
        raise DataError(
            f"there is no column {', '.join(map(repr, sorted(missing)))}: the columns are "
            f"{', '.join(schema.names)}"
        )
    return pa.schema([field for field in schema if field.name in names])


def _differences(first: pa.Schema, other: pa.Schema) -> dict[str, str]:
    """The columns that are not in both schemas alike, and how they differ."""
    odd = {f.name: f"{f.name} is {f.type}" for f in other if f not in first}
    missing = {
        f.name: f"{f.name} ({f.type}) is missing" for f in first if f.name not in other.names
    }
    return {**odd, **missing}
