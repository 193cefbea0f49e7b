"""Feed: the batches of one rank, prepared ahead in threads.

    Order --row numbers--> PackedStore --rows--> Fields --values--> [queue] --batches--> main

The queue holds chunks of many batches: handing over each small batch by itself would take longer
than gathering it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from horovod_runner.data.feed import inexact
from horovod_runner.data.feed.ahead import Ahead
from horovod_runner.data.feed.epochs import Epochs, FeedKey
from horovod_runner.data.feed.fields import Field
from horovod_runner.data.feed.options import WEIGHT, FeedOptions
from horovod_runner.data.feed.order import Order, PerRankOrder
from horovod_runner.data.feed.part import Part
from horovod_runner.data.feed.read_ahead import ReadAhead
from horovod_runner.data.pack.buffers import Buffers
from horovod_runner.data.pack.columns import Array, Rows
from horovod_runner.data.pack.store import PackedStore
from horovod_runner.errors import DataError
from horovod_runner.host.control_groups import memory_for_files
from horovod_runner.worker.profiling.clock import cells, clock

T = TypeVar("T")
Make: TypeAlias = Callable[[list[str], list[Any]], list[T]]
# One chunk is in use, one waits, and up to two are being made.
# NumPy asks for huge pages for memory of 4 MB and more.
_CHUNK_BYTES = 5 << 20
_MAX_CHUNK_STEPS = 160
_CHUNKS_DRAWN = 4  # whose row numbers are computed together
_CHUNKS_READ_AHEAD = 4  # chunks whose rows are requested from disk before they are gathered


@dataclass(frozen=True)
class Plan:
    """The parts of a feed."""

    options: FeedOptions
    store: PackedStore  # opened
    order: Order | PerRankOrder
    place: tuple[int, int]  # this rank's number, and the number of ranks
    fields: list[Field]
    part: Part | None  # the rows that the order is of; None for all of the store
    state: dict[str, Any]  # values that must be equal when a saved state is loaded
    epochs: Epochs  # of all feeds of the dataset

    @property
    def key(self) -> FeedKey:
        """Feeds with the same key share a count of epochs."""
        options = self.options
        columns = options.columns
        named = dict(columns) if isinstance(columns, Mapping) else columns
        how = "shuffled" if options.shuffle else "in order"
        rows = self.state["global_batch"]
        text = f"{options.framework} batches of {rows} rows over all ranks, {how}, "
        text += f"columns={named}, last_batch={options.how_last!r}"
        return FeedKey(text, options.seed if options.shuffle else None, self.place)


class Feed(Generic[T]):
    """The batches of one rank; each iteration is an epoch.

    The first iteration is the epoch after those of earlier feeds with the same options, so a feed
    may be made anew in each epoch; or it resumes where :meth:`load_state_dict` says. An iteration
    that is left early counts as a whole epoch.

    Args:
        plan: what the feed is made of.
        make: turns the values of the parts, for some steps, into a list of batches, one per step.
            The values of a part are an array of shape (steps, rows, ...), or a list with one entry
            per step.

    Attributes:
        names: names of the parts of a batch.
    """

    def __init__(self, plan: Plan, make: Make[T]) -> None:
        self._plan = plan
        self._order = plan.order
        self._make = make
        self._buffers = Buffers()
        self._made = plan.epochs.make(plan.key)
        self._epoch, self._step = self._made.epoch, 0
        self._begun = False
        self._is_open = False
        self._is_resumed = False
        self._given = 0  # steps of the epoch that the last batch belongs to
        self._equal = plan.options.framework == "tensorflow"  # which builds a graph for each size
        self._is_stale = False  # batches that were prepared ahead must be made anew
        is_shared = plan.options.global_batch is not None and plan.place[1] > 1
        self._checks_layers = is_shared and plan.options.has_weights
        self.names = [field.name for field in plan.fields] + [WEIGHT] * plan.options.has_weights
        self._columns = list(dict.fromkeys(c.name for f in plan.fields for c in f.columns))

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self._order.steps

    @property
    def real(self) -> int:
        """Rows of the last batch that are not padding; they come first in the batch."""
        return self.real_rows(self._given - 1) if self._given else 0

    def real_rows(self, step: int) -> int:
        """Rows of this rank's batch in a step of an epoch that are not padding."""
        return self._order.real(step, *self._plan.place)

    def batch_rows(self, step: int) -> int:
        """Rows of this rank's batch in a step of an epoch, padding included."""
        return self._order.batch_rows(step, *self._plan.place, equal=self._equal)

    @property
    def weight(self) -> float:
        """Factor of this rank's loss for the last batch, by which ranks with more rows count more.

        The last batch is the one that was taken last, also where batches are taken ahead.
        It is the rows of this rank's part x the number of ranks / the rows of the global batch. The
        average over the ranks of the weighted mean losses is then the mean over the global batch.
        It is 1.0 where all parts have the same number of rows, and 0.0 for an empty part.
        """
        step = max(0, self._given - 1)
        part = self._order.part_rows(step, *self._plan.place)
        return part * self.ranks / self._order.global_rows(step)

    def use_equal_parts(self) -> None:
        """Fill the following batches up to the same number of rows on all ranks and in all steps.

        Ranks need not agree on it: their parts stay the same, and repeated rows follow them.
        """
        self._is_stale = not self._equal
        self._equal = True

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._plan.place[0]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._plan.place[1]

    @property
    def next_step(self) -> int:
        """The step of its epoch with which the next iteration begins."""
        return 0 if self._begun else self._step

    def __iter__(self) -> Iterator[T]:
        # Whether the first parts, which are counted, have the same size in all batches of a chunk.
        alike = self._plan.options.transform is None and self._plan.fields[0].is_uniform
        for batches in self.chunks():
            size = cells(batches[0]) if alike else 0
            for batch in batches:
                self._step += 1
                self._given = self._step
                clock.count_batch(size if alike else cells(batch))
                yield batch
                if self._is_stale:
                    break

    def chunks(self) -> Iterator[list[T]]:
        """Yield the next epoch as ``make`` returns it: several batches at a time."""
        if self._begun:  # the last iteration was left early
            self._epoch, self._step = self._epoch + 1, 0
        self._begun = True
        epochs = self._plan.epochs
        epochs.begin(self._made.key, self._epoch)
        if not self._is_open:
            self._is_open = True
            epochs.open(self._made, self._epoch, self._step, resumed=self._is_resumed)
        if self._checks_layers:  # layers may be unfrozen later
            self._checks_layers = not inexact.check_layers(self)
        self._is_stale = True
        while self._is_stale:
            self._is_stale = False
            yield from self._made_ahead(self._row_numbers(self._epoch, self._step))
        self._epoch, self._step, self._begun = self._epoch + 1, 0, False

    def _made_ahead(self, numbers: Iterator[tuple[int, Array]]) -> Iterator[list[T]]:
        """Make batches in a thread, until they are stale."""
        options = self._plan.options
        # A transform runs in one thread only. So does decoding: each image makes a thread wait for
        # Python's global lock, and two threads were hardly faster than one.
        decodes = any(field.decodes for field in self._plan.fields)
        is_helped = options.transform is None and not decodes
        with Ahead(numbers, self._chunk, ahead=options.prefetch, is_helped=is_helped) as ahead:
            while not self._is_stale:
                with clock.timing("data"):
                    batches = next(ahead, None)
                if batches is None:
                    return
                yield batches

    def _row_numbers(self, epoch: int, step: int) -> Iterator[tuple[int, Array]]:
        steps = self._steps_of_a_chunk()
        ahead = ReadAhead(self._plan.store.matrix_files(self._columns), memory_for_files())
        drawn: deque[tuple[int, Array]] = deque()
        place = self._plan.place
        while step < self._order.steps:
            rows = self._order.take(epoch, step, steps * _CHUNKS_DRAWN, *place, equal=self._equal)
            if self._plan.part is not None:
                rows = self._plan.part.numbers(rows)
            ahead.request(rows.ravel())
            for first in range(0, len(rows), steps):
                drawn.append((step + first, rows[first : first + steps]))
            step += len(rows)
            while len(drawn) > _CHUNKS_READ_AHEAD:
                yield drawn.popleft()
        yield from drawn

    def _chunk(self, numbers: tuple[int, Array]) -> list[T]:
        first, rows = numbers
        options = self._plan.options
        with clock.stage("gather"):
            taken = self._plan.store.take(rows.ravel(), self._columns, self._buffers)
        values = []
        for field in self._plan.fields:
            with clock.stage(field.stage):
                values.append(_by_step(field, taken, len(rows), self._buffers))
        if options.has_weights:
            values.append(self._weights(first, rows))
        with clock.stage("convert" if options.transform is None else "transform"):
            return self._make(self.names, values)

    def _weights(self, step: int, rows: Array) -> Array:
        """Weights of the rows of some steps; 0 for padding.

        Keras divides the sum of a batch's weighted losses by its rows, and then averages over the
        ranks. With these weights that is the sum over the global batch divided by its rows.
        """
        weights = np.zeros(rows.shape, np.float32)
        for number, of_step in enumerate(weights, step):
            share = len(of_step) * self.ranks / self._order.global_rows(number)
            of_step[: self.real_rows(number)] = share
        return weights

    def _steps_of_a_chunk(self) -> int:
        size = sum(self._plan.store.row_bytes(name) for name in self._columns)
        size += sum(field.decoded_bytes for field in self._plan.fields)
        size *= self.batch_rows(0)
        return int(min(max(1, _CHUNK_BYTES // max(1, size)), _MAX_CHUNK_STEPS))

    def skip(self, batches: int) -> None:
        """Begin after this many batches, counted over all epochs."""
        if batches:
            self._resume(*divmod(batches, max(1, len(self))))

    def state_dict(self) -> dict[str, Any]:
        """The feed's position, in a few plain values.

        ``epoch`` and ``step`` are those of the next batch. After the last batch of an epoch that is
        the first one of the next epoch, also before the loop over this epoch has ended.
        """
        epoch, step = self._epoch, self._step
        if step == len(self):
            epoch, step = epoch + 1, 0
        return {**self._plan.state, "epoch": epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the position of another feed, with any number of ranks.

        Raises:
            DataError: the state belongs to other data, to another seed or another global batch, or
                it is not the state of a feed.
        """
        missing = {*self._plan.state, "epoch", "step"} - set(state)
        if missing:
            raise DataError(
                f"this is not the state of a feed: it lacks {', '.join(sorted(missing))}. Pass "
                "what state_dict() of a feed returned"
            )
        for name, value in {"part": None, **self._plan.state}.items():
            if state.get(name) != value:
                raise DataError(
                    f"this feed cannot resume from the saved state: {name} is {value!r} here and "
                    f"was {state.get(name)!r} there. {_REMEDIES.get(name, 'Use the same value')}"
                )
        if not 0 <= int(state["step"]) <= len(self):
            raise DataError(
                f"the saved state is at step {state['step']} of an epoch, and an epoch has "
                f"{len(self)} steps: it belongs to another feed"
            )
        self._resume(int(state["epoch"]), int(state["step"]))

    def _resume(self, epoch: int, step: int) -> None:
        self._epoch, self._step = epoch, step
        self._begun, self._is_open, self._is_resumed = False, False, True


_REMEDIES = {
    "data": "The dataset has changed, or it is a DataFrame that ends with a shuffle, whose rows "
    "come in another order each time: write it to Parquet, and pass that",
    "global_batch": "Choose batch_size so that np x batch_size stays the same, or pass "
    "global_batch instead of batch_size",
    "part": "Shard.split must divide the rows as before",
    "ranks": "Each rank has rows of its own here, so np must stay the same: with "
    "data_config=DataConfig(shared_dir=...), or Parquet files, it may change",
}


def dicts_of(transform: Callable[[Any], Any] | None) -> Make[Any]:
    """A ``make`` for batches that are dicts of arrays, passed through ``transform``."""

    def make(names: list[str], values: list[Any]) -> list[Any]:
        batches = [dict(zip(names, parts, strict=True)) for parts in zip(*values, strict=True)]
        if transform is None:
            return batches
        return [transform(batch) for batch in batches]

    return make


def _by_step(field: Field, taken: Mapping[str, Rows], steps: int, buffers: Buffers) -> Any:
    """A part's values: an array (steps, rows, ...) if all steps have one shape, else a list."""
    if field.is_uniform:
        values = field.of(taken, buffers)
        return values.reshape(steps, -1, *values.shape[1:])
    name = field.columns[0].name
    rows = taken[name]
    assert rows.lengths is not None  # noqa: S101 - it is ragged
    lengths = rows.lengths.reshape(steps, -1)
    ends = np.cumsum(lengths.sum(axis=1))[:-1]
    parts = zip(np.split(rows.values, ends), lengths, strict=True)
    return [field.of({name: Rows(values, of_step)}) for values, of_step in parts]
