"""Delta tables: their live files, without the rows that deletion vectors have deleted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data.files import File, Files, Filter, chosen, look
from horovod_runner.errors import DataError


def find(
    path: str,
    *,
    version: int | None = None,
    columns: Sequence[str] | None = None,
    filter_: Filter | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    ragged: Sequence[str] = (),
) -> Files:
    """Look at a table's files.

    Args:
        path: the table's folder, or its URL.
        version: of the table; None for the newest.
        columns: as for Parquet files, like the arguments below.
        filter_: which rows count.
        storage_options: for deltalake; fsspec reads the files with the same ones.
        fill: for nulls.
        ragged: lists that are no vectors.

    Raises:
        DataError: deltalake is not installed, or there is no such table.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise DataError(
            f"{path} takes deltalake to be read: pip install 'horovod_runner[delta]'"
        ) from error
    import fsspec

    try:
        table = DeltaTable(path, version=version, storage_options=dict(storage_options or {}))
        schema = json.loads(table.schema().to_json())
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        uris, masks = table.file_uris(), _kept(table)
    except Exception as error:  # deltalake's own kinds
        raise DataError(f"{path} cannot be read as a Delta table: {error}") from error
    filesystem, _ = fsspec.core.url_to_fs(path, **(storage_options or {}))
    kept = {filesystem._strip_protocol(uri): bits for uri, bits in masks.items()}
    physical = {
        column["metadata"].get("delta.columnMapping.physicalName", column["name"]): column["name"]
        for column in schema["fields"]
    }
    renamed = {own: name for own, name in physical.items() if own != name}
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
        raise DataError(f"{path} has no rows")
    looked = look(filesystem, sorted(files, key=lambda file: file.path), filter_)
    return chosen(looked, columns, fill, ragged)


def _constant(name: str, value: object) -> pa.Scalar:
    if value is None:
        raise DataError(f"partition column {name.removeprefix('partition.')!r} has nulls")
    return pa.scalar(value)


def _kept(table: Any) -> dict[str, bytes]:
    """The rows that count, of the files that have deletion vectors, as packed bits."""
    found = {}
    for batch in table.deletion_vectors():
        rows = pa.record_batch(batch)
        for uri, mask in zip(rows.column(0).to_pylist(), rows.column(1), strict=True):
            bits = mask.values.to_numpy(zero_copy_only=False)
            found[uri] = np.packbits(bits, bitorder="little").tobytes()
    return found
