"""Delta tables: finds their current files, without the rows that deletion vectors delete.

The table's log says which columns there are. Its files may lack some, have dropped ones, or have
them by other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from horovod_runner.data.read.files import File, Files, connect
from horovod_runner.data.read.listing import Reading, inspect
from horovod_runner.errors import DataError

# Features of a table that change how it is read, and that are read here.
_FEATURES = {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint"}
_INSTEAD = "pass a Spark DataFrame: spark.read.format('delta').load(path)"


def find(path: str, version: int | None, reading: Reading) -> Files:
    """Find the files of a table, in its newest version if it is None, and count their rows.

    The storage options are for deltalake and for fsspec, which reads the files.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise DataError(
            f"reading {path} requires deltalake: pip install 'horovod_runner[delta]'"
        ) from error
    storage = dict(reading.storage_options or {})
    try:
        table = DeltaTable(path, version=version, storage_options=storage)
        features = set(table.protocol().reader_features or ())
        # The last one is about what VACUUM may delete.
        _refuse_features(path, features - _FEATURES - {"vacuumProtocolCheck"})
        fields = json.loads(table.schema().to_json())["fields"]
        schema = pa.schema(table.schema().to_arrow()).remove_metadata()
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        masks = _row_masks(table) if "deletionVectors" in features else {}
    except DataError:
        raise
    except Exception as error:  # deltalake raises classes of its own
        said = str(error).partition("\n")[0]  # a stack may follow
        raise DataError(
            f"{path} cannot be read as a Delta table: {said}. Check the path, the version and "
            f"storage_options. If the table has what deltalake cannot read, {_INSTEAD}"
        ) from error
    filesystem, folder = connect(path, storage)
    root = _decoded(filesystem._strip_protocol(table.table_uri)).rstrip("/")
    kept = {_decoded(filesystem._strip_protocol(uri)): bits for uri, bits in masks.items()}
    names = {_name_in_file(field): field["name"] for field in fields}
    files = []
    for action in actions:
        file = unquote(action["path"])
        if file.startswith("/") or re.match(r"\w+:/", file):
            raise DataError(
                f"the Delta table {path} has files outside of its folder, such as {file}, as a "
                f"shallow clone has: {_INSTEAD}"
            )
        constants = {
            name: pa.scalar(value, schema.field(name).type)
            for key, value in action.items()
            if (name := key.removeprefix("partition.")) != key
        }
        mask = kept.pop(f"{root}/{_decoded(file)}", None)
        files.append(File(f"{folder.rstrip('/')}/{file}", constants, mask, names, schema=schema))
    if not files:
        raise DataError(f"{path} has no rows: choose another version of the table")
    if kept:  # their deleted rows would be read
        raise DataError(
            f"{path} has {len(kept)} deletion vectors of files that are not among its "
            f"{len(files)} files, such as {next(iter(kept))}: {_INSTEAD}"
        )
    refused = {
        field["name"]: f"column {field['name']!r} has fields with other names in the files of "
        f"{path} (column mapping within a struct), which cannot be read: leave it out with "
        f"columns=, or {_INSTEAD}"
        for field in fields
        if _is_renamed_within(field["type"])
    }
    return inspect(filesystem, sorted(files, key=lambda file: file.path), reading, refused)


def _refuse_features(path: str, features: Iterable[str]) -> None:
    if features:
        raise DataError(
            f"the Delta table {path} has features that the ranks cannot read: "
            f"{', '.join(sorted(features))}. {_INSTEAD[0].upper()}{_INSTEAD[1:]}; or turn each of "
            f"them off in Spark: ALTER TABLE delta.`{path}` DROP FEATURE `{min(features)}`"
        )


def _decoded(path: str) -> str:
    """A path without percent signs: deltalake encodes some of a table's paths, and some twice."""
    while (once := unquote(path)) != path:
        path = once
    return path


def _name_in_file(field: Any) -> str:
    return str(field["metadata"].get("delta.columnMapping.physicalName", field["name"]))


def _is_renamed_within(type_: Any) -> bool:
    if isinstance(type_, str):
        return False
    inner = (type_.get(key, "") for key in ("elementType", "keyType", "valueType"))
    return any(map(_is_renamed_within, inner)) or any(
        _name_in_file(field) != field["name"] or _is_renamed_within(field["type"])
        for field in type_.get("fields", ())
    )


def _row_masks(table: Any) -> dict[str, bytes]:
    """For each file with a deletion vector, which of its rows count, as packed bits."""
    masks = {}
    for batch in table.deletion_vectors():
        rows = pa.record_batch(batch)
        for uri, mask in zip(rows.column(0).to_pylist(), rows.column(1), strict=True):
            bits = mask.values.to_numpy(zero_copy_only=False)
            masks[uri] = np.packbits(bits, bitorder="little").tobytes()
    return masks
