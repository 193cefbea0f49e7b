"""A rank's rows without padding, read once, outside of the epochs of a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from horovod_runner.data.feed.epochs import Epochs
from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.pack.columns import Array

T = TypeVar("T")


class RowsOnce(Feed[T]):
    """This rank's rows, each once and without padding: for validation and for statistics.

    Batches may have fewer rows, and ranks fewer batches. All sample weights are 1. An iteration
    counts as no epoch, so the order of a training with the same options stays as it is.

    Attributes:
        plan: of the feed that gives the parts of a batch and the order.
        rows: this rank's number of rows. If it is 0, there is still one batch with one row of
            another rank, for code that needs a batch.
    """

    def __init__(self, feed: Feed[T]) -> None:
        self.plan = feed._plan
        super().__init__(replace(feed._plan, epochs=Epochs("")), feed._make)
        self._equal = False
        self._real = [self.real_rows(step) for step in range(self._order.steps)]
        self.rows = sum(self._real)

    def __len__(self) -> int:
        """This rank's batches."""
        return sum(map(bool, self._real)) or 1

    def chunks(self) -> Iterator[list[T]]:
        """See :meth:`Feed.chunks`."""
        return self._made_ahead(self._row_numbers(0, 0))

    def _row_numbers(self, epoch: int, step: int) -> Iterator[tuple[int, Array]]:
        for first, rows in super()._row_numbers(epoch, step):
            real = self._real[first : first + len(rows)]
            if not self.rows:
                yield first, rows[:1, :1]
                return
            if min(real) == rows.shape[1]:
                yield first, rows
                continue
            for at, count in enumerate(real):
                if count:
                    yield first + at, rows[at : at + 1, :count]

    def _weights(self, step: int, rows: Array) -> Array:
        return np.ones(rows.shape, np.float32)
