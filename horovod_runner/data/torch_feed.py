"""Batches, or rows, as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from horovod_runner.data.columns import Array
from horovod_runner.data.fields import Field
from horovod_runner.data.store import Store


class RowDataset(Dataset[Any]):  # type: ignore[misc]
    """Some rows of a store, each by itself, for a DataLoader.

    Args:
        store: opened.
        fields: what a row is made of.
        rows: which ones.
        as_tuple: rows are tuples, else dicts.
        transform: called with each row.
    """

    def __init__(
        self,
        store: Store,
        fields: Sequence[Field],
        rows: Array,
        as_tuple: bool,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._store = store
        self._fields = fields
        self._rows = rows
        self._as_tuple = as_tuple
        self._transform = transform
        self._names = list(dict.fromkeys(c.name for f in fields for c in f.columns))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Rows that a DataLoader wants together."""
        taken = self._store.take(self._rows[np.asarray(numbers)], self._names)
        parts = [
            torch.from_numpy(values).unbind(0) if isinstance(values, np.ndarray) else values
            for values in (field.of(taken) for field in self._fields)
        ]
        names = [field.name for field in self._fields]
        rows = zip(*parts, strict=True)
        found = list(rows) if self._as_tuple else [dict(zip(names, r, strict=True)) for r in rows]
        return found if self._transform is None else [self._transform(row) for row in found]


class Make:
    """Turns the values of some steps into batches of tensors.

    Args:
        as_tuple: batches are tuples, else dicts.
        transform: called with each batch of NumPy arrays.
        device: where the tensors go; None for the current GPU, or the CPU where there is none.
    """

    def __init__(
        self,
        as_tuple: bool,
        transform: Callable[[dict[str, Any]], Any] | None,
        device: torch.device | str | None,
    ) -> None:
        self._as_tuple = as_tuple
        self._transform = transform
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # What is current is each thread's own, and batches are made in another one.
            self._device = torch.device("cuda", torch.cuda.current_device())

    def __call__(self, names: list[str], values: list[Any]) -> list[Any]:
        """See :class:`~horovod_runner.data.feed.Feed`."""
        if self._transform is not None:
            found = [dict(zip(names, one, strict=True)) for one in zip(*values, strict=True)]
            return [self._tensors(self._transform(batch)) for batch in found]
        parts = [
            self._tensor(part).unbind(0)
            if isinstance(part, np.ndarray)
            else [self._tensors(one) for one in part]
            for part in values
        ]
        if self._as_tuple:
            return list(zip(*parts, strict=True))
        return [dict(zip(names, one, strict=True)) for one in zip(*parts, strict=True)]

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _tensors(self, value: Any) -> Any:
        """All arrays in it as tensors; lists of text and the like stay."""
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, dict):
            found = {name: self._tensors(one) for name, one in value.items()}
            return tuple(found.values()) if self._as_tuple else found
        if isinstance(value, tuple | list) and any(isinstance(v, np.ndarray) for v in value):
            return type(value)(self._tensors(one) for one in value)
        return value
