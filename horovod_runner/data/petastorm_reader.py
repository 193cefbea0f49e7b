"""Petastorm datasets: read as Parquet where that is all there is to it, else by Petastorm itself.

Petastorm's own shards differ in their number of batches, and ranks that reduce wait for each other
for ever. Here it only reads, a row group at a time; which rank gets which row is decided as for
every other source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data import columns as cols
from horovod_runner.errors import DataError

_BATCH_ROWS = 1 << 10


@dataclass(frozen=True)
class PetastormReader:
    """What Petastorm reads, by row groups, of which nobody knows beforehand how many rows they give.

    Attributes:
        url: the dataset's.
        options: for petastorm.make_reader.
        parts: the number of row groups.
        schema: of what is read.
        fingerprint: names the data.
    """

    url: str
    options: Mapping[str, Any]
    parts: int
    schema: pa.Schema
    fingerprint: str
    fill: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, part: int) -> Iterator[pa.RecordBatch]:
        """The rows of a row group."""
        rows: list[dict[str, Any]] = []
        for row in _rows(self.url, self.options, part, self.parts):
            rows.append(row)
            if len(rows) == _BATCH_ROWS:
                yield _batch(rows, self.schema)
                rows = []
        if rows:
            yield _batch(rows, self.schema)


def look(url: str, options: Mapping[str, Any], versions: Sequence[str]) -> PetastormReader:
    """Look at a dataset.

    Args:
        url: the dataset's.
        options: for petastorm.make_reader.
        versions: of its files.

    Raises:
        DataError: Petastorm is not installed, or cannot read it.
    """
    reader = _open(url, options, 0, 1)
    try:
        parts = len(reader._ventilator._items_to_ventilate) if reader._ventilator else 1
    finally:
        reader.stop()
        reader.join()
    first = next(_rows(url, options, 0, 1), None)
    if first is None:
        raise DataError(f"{url} gives no rows")
    digest = hashlib.blake2b(repr((versions, options)).encode(), digest_size=8)
    schema = _batch([first], None).schema
    cols.choose(schema)
    return PetastormReader(url, options, parts, schema, digest.hexdigest())


def _open(url: str, options: Mapping[str, Any], part: int, parts: int) -> Any:
    try:
        from petastorm import make_reader
    except ImportError as error:
        raise DataError(
            f"{url} takes Petastorm to be read ({error}): pip install 'horovod_runner[petastorm]'"
        ) from error
    try:
        return make_reader(
            url,
            reader_pool_type="dummy",
            shuffle_row_groups=False,
            num_epochs=1,
            cur_shard=part,
            shard_count=parts,
            **options,
        )
    except Exception as error:
        raise DataError(f"Petastorm cannot read {url}: {error}") from error


def _rows(url: str, options: Mapping[str, Any], part: int, parts: int) -> Iterator[dict[str, Any]]:
    with _open(url, options, part, parts) as reader:
        for row in reader:
            if isinstance(row, dict):  # an ngram: rows by their distance in time
                yield {
                    f"{offset}.{name}": value
                    for offset, one in row.items()
                    for name, value in one._asdict().items()
                }
            else:
                yield dict(row._asdict())


def _batch(rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None) -> pa.RecordBatch:
    names = list(rows[0])
    arrays = [_array([row[name] for row in rows]) for name in names]
    batch = pa.RecordBatch.from_arrays(arrays, names)
    return batch if schema is None else pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any]) -> pa.Array:
    first = values[0]
    if not isinstance(first, np.ndarray) or first.ndim == 0 or first.dtype.kind not in "biuf":
        return pa.array([v.item() if isinstance(v, np.generic) else v for v in values])
    if all(value.shape == first.shape for value in values):
        found = pa.array(np.concatenate([value.ravel() for value in values]))
        for size in reversed(first.shape):
            found = pa.FixedSizeListArray.from_arrays(found, size)
        return found
    return pa.array([value.tolist() for value in values])
