"""From a store to batches, in threads beside the training.

    Order --row numbers--> Store --rows--> Fields --values--> [queue] --batches--> main

What crosses the queue is a chunk of many batches: handing over each small batch by itself would
take longer than gathering it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from horovod_runner.data.ahead import Ahead
from horovod_runner.data.columns import Array, Rows
from horovod_runner.data.fields import Field
from horovod_runner.data.order import Order, OwnOrder
from horovod_runner.data.store import Buffers, Store
from horovod_runner.errors import DataError

T = TypeVar("T")
Make: TypeAlias = Callable[[list[str], list[Any]], list[T]]
# One chunk is in use, one waits and up to two are being made.
_CHUNK_BYTES = 3 << 20
_MAX_CHUNK_STEPS = 256
_CHUNKS_READ_AHEAD = 4  # from disk
WEIGHT = "weight"


@dataclass(frozen=True)
class Plan:
    """What a feed is made of.

    Attributes:
        store: opened.
        order: of the rows.
        place: this rank's number, and the number of ranks.
        fields: what a batch is made of.
        weights: whether it ends with a 1 for each row, and a 0 for padding.
        same: what must be the same where a saved state is loaded.
    """

    store: Store
    order: Order | OwnOrder
    place: tuple[int, int]
    fields: list[Field]
    weights: bool
    same: dict[str, Any]


class Feed(Generic[T]):
    """The batches of one rank; each iteration is an epoch.

    The first iteration is epoch 0, or goes on where :meth:`load_state_dict` says. One that is left
    early counts as its epoch.

    Args:
        plan: what it is made of.
        make: turns the values of the plan's fields, of some steps, into as many batches. A field's
            values are an array of shape (steps, rows, ...), or a list with an entry for each step.
        prefetch: how many chunks of batches wait ready, at most.
        is_helped: whether whoever waits for a batch makes later ones meanwhile.

    Attributes:
        names: of the parts of a batch.
    """

    def __init__(
        self, plan: Plan, make: Make[T], prefetch: int = 1, *, is_helped: bool = False
    ) -> None:
        self._store = plan.store
        self._order = plan.order
        self._place = plan.place
        self._fields = plan.fields
        self._has_weights = plan.weights
        self._same = plan.same
        self._make = make
        self._buffers = Buffers()
        self._prefetch = prefetch
        self._is_helped = is_helped
        self._epoch = self._step = 0
        self._begun = False
        self._given = 0  # steps of the epoch whose batch was given last
        self.names = [field.name for field in plan.fields] + [WEIGHT] * plan.weights
        self._names = list(dict.fromkeys(c.name for f in plan.fields for c in f.columns))

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self._order.steps

    @property
    def real(self) -> int:
        """How many rows of the last batch are no padding; they come first in it."""
        return self._order.real(self._given - 1, *self._place) if self._given else 0

    def __iter__(self) -> Iterator[T]:
        for batches in self.chunks():
            for batch in batches:
                self._step += 1
                self._given = self._step
                yield batch

    def chunks(self) -> Iterator[list[T]]:
        """The next epoch, as ``make`` gives it: some batches at a time."""
        if self._begun:  # and was left early
            self._epoch, self._step = self._epoch + 1, 0
        self._begun = True
        numbers = self._row_numbers(self._epoch, self._step)
        with Ahead(numbers, self._chunk, ahead=self._prefetch, is_helped=self._is_helped) as ahead:
            yield from ahead
        self._epoch, self._step, self._begun = self._epoch + 1, 0, False

    def _row_numbers(self, epoch: int, step: int) -> Iterator[tuple[int, Array]]:
        steps = self._steps_of_a_chunk()
        ahead = self._store.read_ahead(self._names)
        drawn: deque[tuple[int, Array]] = deque()
        while step < self._order.steps:
            rows = self._order.take(epoch, step, steps, *self._place)
            if ahead is not None:
                ahead.ask(rows.ravel())
            drawn.append((step, rows))
            step += len(rows)
            if len(drawn) > _CHUNKS_READ_AHEAD:
                yield drawn.popleft()
        yield from drawn

    def _chunk(self, numbers: tuple[int, Array]) -> list[T]:
        first, rows = numbers
        taken = self._store.take(rows.ravel(), self._names, self._buffers)
        values = [_by_step(field, taken, len(rows)) for field in self._fields]
        if self._has_weights:
            values.append(self._weights(first, rows))
        return self._make(self.names, values)

    def _weights(self, step: int, rows: Array) -> Array:
        """A 1 for each row of some steps, and a 0 for padding."""
        found = np.ones(rows.shape, np.float32)
        for number, weights in enumerate(found):
            weights[self._order.real(step + number, *self._place) :] = 0
        return found

    def _steps_of_a_chunk(self) -> int:
        rows = self._order.batch_rows(*self._place)
        size = sum(self._store.row_bytes(name) for name in self._names)
        return int(min(max(1, _CHUNK_BYTES // max(1, size * rows)), _MAX_CHUNK_STEPS))

    def skip(self, batches: int) -> None:
        """Begin behind so many batches, of all epochs together."""
        self._epoch, self._step = divmod(batches, max(1, len(self)))
        self._begun = False

    def state_dict(self) -> dict[str, Any]:
        """Where the feed is, in a few plain values."""
        return {**self._same, "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another feed was, of any number of ranks.

        Raises:
            DataError: that was over other data, with another seed or another global batch, or it
                is no state of a feed at all.
        """
        missing = {*self._same, "epoch", "step"} - set(state)
        if missing:
            raise DataError(f"this is no state of a feed: it lacks {', '.join(sorted(missing))}")
        for name, own in self._same.items():
            if state[name] != own:
                why = ""
                if name == "data":
                    why = (
                        ": the dataset has changed, or it is a DataFrame that ends with a shuffle, "
                        "whose rows come in another order each time"
                    )
                raise DataError(
                    f"this feed cannot go on where the saved one was: {name} is {own!r} here and "
                    f"was {state[name]!r} there{why}"
                )
        if not 0 <= int(state["step"]) <= len(self):
            raise DataError(f"step {state['step']} of an epoch of {len(self)} steps")
        self._epoch, self._step, self._begun = int(state["epoch"]), int(state["step"]), False


def _by_step(field: Field, taken: Mapping[str, Rows], steps: int) -> Any:
    """A field's values: an array (steps, rows, ...) where all are alike, else a list."""
    if field.is_uniform:
        values = field.of(taken)
        return values.reshape(steps, -1, *values.shape[1:])
    name = field.columns[0].name
    rows = taken[name]
    assert rows.lengths is not None  # noqa: S101 - it is ragged
    lengths = rows.lengths.reshape(steps, -1)
    ends = np.cumsum(lengths.sum(axis=1))[:-1]
    parts = zip(np.split(rows.values, ends), lengths, strict=True)
    return [field.of({name: Rows(values, own)}) for values, own in parts]
