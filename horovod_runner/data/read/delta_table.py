"""Delta tables: finds their current files, without the rows that deletion vectors delete."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data.read.files import File, Files, connect
from horovod_runner.data.read.listing import Reading, inspect
from horovod_runner.errors import DataError


def find(path: str, version: int | None, reading: Reading) -> Files:
    """Find a table's files and count their rows.

    Args:
        path: the table's folder or URL.
        version: version of the table; None for the newest.
        reading: what of them is read, and how; the storage options are for deltalake and for
            fsspec, which reads the files.

    Raises:
        DataError: deltalake is not installed, or there is no such table.
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
        schema = json.loads(table.schema().to_json())
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        uris, masks = table.file_uris(), _row_masks(table)
    except Exception as error:  # deltalake raises classes of its own
        raise DataError(
            f"{path} cannot be read as a Delta table: {error}. Check the path, the version and "
            "storage_options"
        ) from error
    filesystem, _ = connect(path, storage)
    kept = {filesystem._strip_protocol(uri): bits for uri, bits in masks.items()}
    renamed = _renamed(schema)
    files = []
    for uri, action in zip(uris, actions, strict=True):
        constants = {
            name.removeprefix("partition."): _constant(name, value)
            for name, value in action.items()
            if name.startswith("partition.")
        }
        file = filesystem._strip_protocol(uri)
        files.append(File(file, constants, kept.get(file), renamed))
    if not files:
        raise DataError(f"{path} has no rows: choose another version of the table")
    return inspect(filesystem, sorted(files, key=lambda file: file.path), reading)


def _renamed(schema: Any) -> dict[str, str]:
    """Column names in the files mapped to the table's names, where they differ."""
    names = {
        column["metadata"].get("delta.columnMapping.physicalName", column["name"]): column["name"]
        for column in schema["fields"]
    }
    return {name_in_file: name for name_in_file, name in names.items() if name_in_file != name}


def _constant(name: str, value: object) -> pa.Scalar:
    if value is None:
        raise DataError(
            f"partition column {name.removeprefix('partition.')!r} has nulls, and a tensor cannot "
            "hold nulls: leave those rows out with filter="
        )
    return pa.scalar(value)


def _row_masks(table: Any) -> dict[str, bytes]:
    """For each file with a deletion vector, which of its rows count, as packed bits."""
    masks = {}
    for batch in table.deletion_vectors():
        rows = pa.record_batch(batch)
        for uri, mask in zip(rows.column(0).to_pylist(), rows.column(1), strict=True):
            bits = mask.values.to_numpy(zero_copy_only=False)
            masks[uri] = np.packbits(bits, bitorder="little").tobytes()
    return masks
