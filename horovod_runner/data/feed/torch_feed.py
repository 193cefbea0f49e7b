"""Torch: batches as tensors, and single rows for a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from horovod_runner.data.feed.feed import Feed, dicts_of
from horovod_runner.data.feed.fields import Field
from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.feed.part import Part
from horovod_runner.data.pack.columns import Array
from horovod_runner.data.pack.store import PackedStore


class RowDataset(Dataset[Any]):  # type: ignore[misc]
    """Single rows of a packed dataset, for a DataLoader.

    The dataset has ``rows`` of ``part``, or of the store if it is None. All ranks have
    ``all_rows``; None if the store has only this rank's.

    Attributes:
        is_whole: whether these are the rows of all ranks.
    """

    def __init__(
        self,
        store: PackedStore,
        fields: Sequence[Field],
        rows: Array,
        options: FeedOptions,
        *,
        part: Part | None,
        all_rows: int | None,
    ) -> None:
        self._store = store
        self._fields = fields
        self._rows = rows
        self._options = options
        self._part = part
        self._all_rows = all_rows
        self.is_whole = options.whole
        self._names = list(dict.fromkeys(c.name for f in fields for c in f.columns))

    def whole(self) -> RowDataset | None:
        """The rows of all ranks, as with ``whole=True``; None if this rank has only its own."""
        if self.is_whole or self._all_rows is None:
            return self if self.is_whole else None
        return RowDataset(
            self._store,
            self._fields,
            np.arange(self._all_rows),
            replace(self._options, whole=True, last_batch=None),
            part=self._part,
            all_rows=self._all_rows,
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The rows of a batch; a DataLoader asks for them together."""
        places = self._rows[np.asarray(numbers)]
        stored = places if self._part is None else self._part.numbers(places)
        taken = self._store.take(stored, self._names)
        parts = [
            torch.from_numpy(values).unbind(0) if isinstance(values, np.ndarray) else values
            for values in (field.of(taken) for field in self._fields)
        ]
        rows: list[Any] = list(zip(*parts, strict=True))
        if not self._options.as_tuple:
            names = [field.name for field in self._fields]
            rows = [dict(zip(names, row, strict=True)) for row in rows]
        transform = self._options.transform
        return rows if transform is None else [transform(row) for row in rows]


class Batches(IterableDataset[Any]):  # type: ignore[misc]
    """The first batches of a feed, or all of an epoch, for code that takes a ``DataLoader``."""

    def __init__(self, feed: Feed[Any], steps: int | None = None) -> None:
        self._feed = feed
        self._steps = len(feed) if steps is None else min(steps, len(feed))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(self._feed, self._steps)

    def loader(self) -> DataLoader[Any]:
        """A DataLoader that passes the batches on as they are."""
        return DataLoader(self, batch_size=None, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


class CopiedBatches(list[Any]):
    """Batches of a GPU, ready for the stream that is current where they are iterated over.

    Another thread started the copies on its own stream. Work on other streams has to wait for
    them, and the memory must not be used again before that work is done.
    """

    def __init__(self, batches: list[Any], stream: torch.cuda.Stream) -> None:
        super().__init__(batches)
        self._stream = stream
        self._copied = stream.record_event()

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            stream = torch.cuda.current_stream(self._stream.device)
            if stream != self._stream:
                stream.wait_event(self._copied)
                for tensor in tensors_of(batch):
                    if tensor.device == stream.device:
                        tensor.record_stream(stream)
            yield batch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


class Make:
    """Turns the values of some steps into batches of tensors.

    Args:
        options: says whether a batch is a tuple, how its NumPy arrays are transformed, and to which
            device the tensors go: None for the current GPU, or the CPU if there is none.
    """

    def __init__(self, options: FeedOptions) -> None:
        self._as_tuple = options.as_tuple
        self._transform = options.transform
        device = options.device
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # The current device differs from thread to thread, and another thread makes batches.
            self._device = torch.device("cuda", torch.cuda.current_device())

    def __call__(self, names: list[str], values: list[Any]) -> list[Any]:
        """See :class:`~horovod_runner.data.feed.feed.Feed`."""
        batches = self._batches(names, values)
        if self._device.type == "cuda":
            return CopiedBatches(batches, torch.cuda.current_stream(self._device))
        return batches

    def _batches(self, names: list[str], values: list[Any]) -> list[Any]:
        if self._transform is not None:
            changed = map(self._tensors, dicts_of(self._transform)(names, values))
            if self._as_tuple:
                return [tuple(b.values()) if isinstance(b, dict) else b for b in changed]
            return list(changed)
        parts = [
            self._tensor(part).unbind(0)
            if isinstance(part, np.ndarray)
            else [self._tensors(of_step) for of_step in part]
            for part in values
        ]
        if self._as_tuple:
            return list(zip(*parts, strict=True))
        return [dict(zip(names, of_step, strict=True)) for of_step in zip(*parts, strict=True)]

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _tensors(self, value: Any) -> Any:
        """Convert all arrays in a value to tensors; other values, such as text, stay."""
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, dict):
            return {name: self._tensors(part) for name, part in value.items()}
        kinds = (np.ndarray, dict, list) if isinstance(value, tuple) else np.ndarray
        if isinstance(value, tuple | list) and any(isinstance(v, kinds) for v in value):
            return type(value)(self._tensors(part) for part in value)
        return value
