"""Tables in the driver's memory: Arrow's, and those made from pandas' DataFrames."""

from __future__ import annotations

import hashlib
from io import RawIOBase
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.read.readers import twins


def without_twins(table: pa.Table) -> pa.Table:
    """A table without columns of the same name; its schema notes why, see `columns.refusing`."""
    refused = twins(table.column_names)
    kept = table.select([at for at, name in enumerate(table.column_names) if name not in refused])
    return kept.replace_schema_metadata(column_types.refusing(kept.schema, refused).metadata)


def pandas_table(dataframe: Any) -> pa.Table:
    """A pandas DataFrame as an Arrow table, without the columns that Arrow cannot hold.

    Its schema notes why, see `columns.refusing`.
    """
    arrays: dict[str, pa.Array] = {}
    names = [str(name) for name in dataframe.columns]
    refused = twins(names)
    for at, name in enumerate(names):
        if name in refused:
            continue
        try:
            arrays[name] = _series(dataframe.iloc[:, at])
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            refused[name] = (
                f"column {name!r} of the pandas DataFrame cannot be converted to Arrow, whose "
                f"columns have one type each: {error}. Leave it out, or turn it into numbers, "
                "lists of numbers, text or bytes first"
            )
    table = pa.table(arrays)
    return table.replace_schema_metadata(column_types.refusing(table.schema, refused).metadata)


def _series(values: Any) -> pa.Array:
    """A pandas column as an Arrow array; arrays of several dimensions become lists of lists."""
    if str(values.dtype).startswith("Sparse"):
        values = values.sparse.to_dense()
    if str(values.dtype) == "object":
        if any(hasattr(value, "toArray") for value in values):  # vectors of Spark ML
            values = [v.toArray() if hasattr(v, "toArray") else v for v in values]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        levels = max((array.ndim for array in arrays), default=0)
        if levels > 1:
            type_ = pa.from_numpy_dtype(np.result_type(*arrays))
            for _ in range(levels):
                type_ = pa.list_(type_)
            return pa.array([v.tolist() if isinstance(v, np.ndarray) else v for v in values], type_)
    array = pa.array(values, from_pandas=True)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


class _Digest(RawIOBase):
    """A file that keeps a checksum of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.checksum = hashlib.blake2b(digest_size=8)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.checksum.update(data)
        return len(data)


def digest(table: pa.Table) -> str:
    """A checksum of the columns and of all rows."""
    plain, file = table.replace_schema_metadata(None), _Digest()
    # As a stream: the buffers of a slice are those of the whole table, and without dictionaries.
    with pa.ipc.new_stream(file, plain.schema) as writer:
        writer.write_table(plain, max_chunksize=1 << 13)
    return file.checksum.hexdigest()
