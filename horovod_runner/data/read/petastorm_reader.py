"""Petastorm datasets read with Petastorm: rows by predicates, ngrams and transforms.

Petastorm's shards differ in their number of batches, which would hang ranks that reduce gradients.
So Petastorm only reads here, and rows are assigned to ranks as for every other source. The number
of rows is known once all are read, which happens once on each host.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data.pack import npy
from horovod_runner.data.pack.columns import Array
from horovod_runner.data.read.pieces import join, write_together
from horovod_runner.data.read.readers import Deferred, Pieces
from horovod_runner.errors import DataError

_BATCH_ROWS = 1 << 10
_PARTS = 64


@dataclass(frozen=True)
class PetastormReader(Deferred):
    """A dataset that Petastorm reads, in parts of whole row groups."""

    name: str  # in ``run``
    url: str
    options: Mapping[str, Any]  # for petastorm.make_reader; without a Unischema make_batch_reader
    has_unischema: bool
    parts: int  # how many
    schema: pa.Schema

    def resolve(
        self, rank: int, descriptions: Sequence[bytes], folder: Path
    ) -> tuple[Pieces, None]:
        """Read all rows, together with the other ranks of the host.

        Raises:
            DataError: Petastorm cannot read them, or a column cannot become a tensor.
        """
        pieces = write_together(folder, self.name, self.parts, self._batches)
        return join(pieces, self.schema, folder), None

    def _batches(self, part: int) -> Iterator[pa.RecordBatch]:
        rows = _rows(self.url, self.options, part, self.parts, self.has_unischema)
        for batch in rows:
            try:
                # Petastorm keeps columns in sets, whose order differs from process to process.
                whole = pa.Table.from_batches([batch]).select(self.schema.names).cast(self.schema)
            except (pa.ArrowException, ValueError, KeyError) as error:
                raise DataError(
                    f"{self.url} has rows of other types than its first ones: {error}. Leave the "
                    "column out, or convert it with transform_spec"
                ) from error
            yield from whole.to_batches()


def inspect(
    name: str, url: str, options: Mapping[str, Any], *, has_unischema: bool, groups: int
) -> PetastormReader:
    """Read the first rows of a dataset with so many row groups, for its schema."""
    parts = min(groups, _PARTS)
    batches = (b for part in range(parts) for b in _rows(url, options, part, parts, has_unischema))
    first = next(batches, None)
    batches.close()
    if first is None:
        raise DataError(
            f"{url} gives no rows with {', '.join(options)}: check that the predicate accepts some"
        )
    return PetastormReader(name, url, options, has_unischema, parts, first.schema)


def _rows(
    url: str, options: Mapping[str, Any], part: int, parts: int, has_unischema: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part in their stored order, some at a time."""
    try:
        import petastorm
        from petastorm.errors import NoDataAvailableError
    except ImportError as error:
        raise DataError(
            f"reading {url} with {', '.join(options)} requires Petastorm ({error}): "
            "pip install 'horovod_runner[petastorm]'"
        ) from error
    # It uses deprecated functions of Arrow, and would warn several times for each row group.
    warnings.filterwarnings("ignore", category=FutureWarning, module="petastorm")
    make = petastorm.make_reader if has_unischema else petastorm.make_batch_reader
    try:
        # With a pool of threads, rows would come in another order each time.
        with make(
            url,
            reader_pool_type="dummy",
            shuffle_row_groups=False,
            num_epochs=1,
            cur_shard=part,
            shard_count=parts,
            **options,
        ) as reader:
            yield from _row_batches(reader) if has_unischema else _column_batches(reader)
    except NoDataAvailableError:
        return  # a predicate on partitions left fewer row groups than parts
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(
            f"Petastorm cannot read {url}: {error}. The error comes from the dataset, the "
            "predicate, the ngram or the transform"
        ) from error


def _row_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    rows = map(_cells, reader)
    while some := list(islice(rows, _BATCH_ROWS)):
        yield _batch({name: [row[name] for row in some] for name in some[0]})


def _cells(row: Any) -> Mapping[str, Any]:
    if isinstance(row, dict):  # an ngram: rows by their distance in time
        pairs = [(at, *pair) for at, part in row.items() for pair in part._asdict().items()]
        return {f"{at}.{name}": value for at, name, value in pairs}
    cells: Mapping[str, Any] = row._asdict()
    return cells


def _column_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    for batch in reader:
        columns = batch._asdict()
        for name, values in columns.items():
            # Petastorm turns integers into floats when there is a predicate.
            dtype = reader.schema.fields[name].numpy_dtype
            is_integer = np.dtype(dtype).kind in "biu"
            if is_integer and values.dtype.kind == "f" and not np.isnan(values).any():
                columns[name] = values.astype(dtype)
        yield _batch(columns)


def _batch(columns: Mapping[str, Any]) -> pa.RecordBatch:
    arrays = [_array(values) for values in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def _array(values: Sequence[Any]) -> pa.Array:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return _lists(values.ravel(), values.shape[1:], len(values))
    first = next((value for value in values if value is not None), None)
    if not isinstance(first, np.ndarray) or first.ndim == 0 or first.dtype.kind not in "biuf":
        return pa.array([v.item() if isinstance(v, np.generic) else v for v in values])
    if all(value is not None and value.shape == first.shape for value in values):
        whole = np.concatenate([value.ravel() for value in values])
        return _lists(whole, first.shape, len(values))
    return pa.array([None if value is None else value.tolist() for value in values])


def _lists(values: Array, shape: tuple[int, ...], rows: int) -> pa.Array:
    """Arrays of one shape; one-dimensional ones as lists, as later ones may differ in length."""
    if len(shape) != 1:
        return npy.fixed_lists(values, shape)
    ends = np.arange(rows + 1, dtype=np.int32) * shape[0]
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
