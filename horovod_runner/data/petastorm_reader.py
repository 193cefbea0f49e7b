"""What only Petastorm's own code can read: rows by predicates, ngrams and transforms.

Its shards differ in their number of batches, and ranks that reduce wait for each other for ever.
Here it only reads; which rank gets which row is decided as for every other source. How many rows
there are shows when all is read, once on each host.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data import npy
from horovod_runner.data.columns import Array
from horovod_runner.data.pieces import joined, pieces_together
from horovod_runner.data.readers import Deferred, Pieces
from horovod_runner.errors import DataError

_BATCH_ROWS = 1 << 10


@dataclass(frozen=True)
class PetastormReader(Deferred):
    """A dataset as Petastorm reads it, in parts of whole row groups.

    Attributes:
        name: what the user calls it.
        url: the dataset's.
        options: for petastorm.make_reader, or for make_batch_reader where there is no Unischema.
        has_unischema: whether there is one.
        parts: how many there are.
        schema: of what is read.
    """

    name: str
    url: str
    options: Mapping[str, Any]
    has_unischema: bool
    parts: int
    schema: pa.Schema

    def on(self, rank: int, told: Sequence[bytes], folder: Path) -> tuple[Pieces, None]:
        """All rows, which all ranks on the host read together.

        Raises:
            DataError: Petastorm cannot read it, or a column cannot become a tensor.
        """
        pieces = pieces_together(folder, self.name, self.parts, self._batches)
        return joined(pieces, self.schema, folder), None

    def _batches(self, part: int) -> Iterator[pa.RecordBatch]:
        rows = _rows(self.url, self.options, part, self.parts, self.has_unischema)
        for batch in rows:
            try:
                # Petastorm keeps columns in sets: their order is each process's own.
                whole = pa.Table.from_batches([batch]).select(self.schema.names).cast(self.schema)
            except (pa.ArrowException, ValueError, KeyError) as error:
                raise DataError(
                    f"{self.url} gives rows of other types than its first ones: {error}"
                ) from error
            yield from whole.to_batches()


def look(
    name: str, url: str, options: Mapping[str, Any], *, has_unischema: bool, groups: int
) -> PetastormReader:
    """Look at a dataset.

    Args:
        name: what the user calls it.
        url: the dataset's.
        options: for Petastorm's reader.
        has_unischema: whether it was made by ``materialize_dataset``.
        groups: the number of its row groups.

    Raises:
        DataError: Petastorm is not installed, cannot read it, or gives no rows.
    """
    parts = min(groups, 64)
    batches = (b for part in range(parts) for b in _rows(url, options, part, parts, has_unischema))
    first = next(batches, None)
    batches.close()
    if first is None:
        raise DataError(f"{url} gives no rows with {', '.join(options)}")
    return PetastormReader(name, url, options, has_unischema, parts, first.schema)


def _rows(
    url: str, options: Mapping[str, Any], part: int, parts: int, has_unischema: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of a part, some at a time, in the order that they are stored in."""
    try:
        import petastorm
        from petastorm.errors import NoDataAvailableError
    except ImportError as error:
        raise DataError(
            f"{url} takes Petastorm to be read with {', '.join(options)} ({error}): "
            "pip install 'horovod_runner[petastorm]'"
        ) from error
    # It uses what Arrow has deprecated, a few lines for each row group.
    warnings.filterwarnings("ignore", category=FutureWarning, module="petastorm")
    make = petastorm.make_reader if has_unischema else petastorm.make_batch_reader
    try:
        # A pool of threads would hand rows over in another order each time.
        with make(
            url,
            reader_pool_type="dummy",
            shuffle_row_groups=False,
            num_epochs=1,
            cur_shard=part,
            shard_count=parts,
            **options,
        ) as reader:
            yield from _rowwise(reader) if has_unischema else _columnwise(reader)
    except NoDataAvailableError:
        return  # a predicate on partitions has left fewer row groups than parts
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(f"Petastorm cannot read {url}: {error}") from error


def _rowwise(reader: Any) -> Iterator[pa.RecordBatch]:
    rows: list[Mapping[str, Any]] = []
    for row in reader:
        if isinstance(row, dict):  # an ngram: rows by their distance in time
            pairs = [(at, *pair) for at, one in row.items() for pair in one._asdict().items()]
            rows.append({f"{at}.{name}": value for at, name, value in pairs})
        else:
            rows.append(row._asdict())
        if len(rows) == _BATCH_ROWS:
            yield _batch({name: [row[name] for row in rows] for name in rows[0]})
            rows = []
    if rows:
        yield _batch({name: [row[name] for row in rows] for name in rows[0]})


def _columnwise(reader: Any) -> Iterator[pa.RecordBatch]:
    for batch in reader:
        columns = batch._asdict()
        for name, values in columns.items():
            # A predicate makes floats of whole numbers.
            dtype = reader.schema.fields[name].numpy_dtype
            whole = np.dtype(dtype).kind in "biu"
            if whole and values.dtype.kind == "f" and not np.isnan(values).any():
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
    """Arrays of one shape; those of one dimension as lists, for others may have another length."""
    if len(shape) != 1:
        return npy.lists(values, shape)
    ends = np.arange(rows + 1, dtype=np.int32) * shape[0]
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
