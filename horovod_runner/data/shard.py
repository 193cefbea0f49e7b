"""What a dataset is inside ``main``: this rank's part of it."""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from horovod_runner import context
from horovod_runner.data.columns import Column
from horovod_runner.data.feed import Feed, Plan
from horovod_runner.data.fields import Columns, Pad, fields_of, names_of
from horovod_runner.data.order import Last, Order, OwnOrder
from horovod_runner.data.spill import Spilled
from horovod_runner.data.store import Chunk, Layout, Store
from horovod_runner.errors import DataError
from horovod_runner.folder import VARIABLE, RunFolder

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

Transform = Callable[[dict[str, Any]], Any]


class Reader(Protocol):
    """A source as it travels to the ranks."""

    @property
    def units(self) -> list[int]:
        """The number of rows of each part that is read by itself."""

    @property
    def fingerprint(self) -> str:
        """Names the data."""

    @property
    def columns(self) -> dict[str, Column]:
        """What there is, by name."""

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed: a list may turn out to be a vector."""

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """The rows of a part, packed."""


class Shard:
    """A dataset as ``main`` gets it: every method gives this rank's part.

    What is asked for is packed once on each host, by all ranks that ask for it; from then on a
    batch is one gather.

    Args:
        name: that of the argument of ``run``.
        reader: the source; None in what is sent to the ranks, which get it apart.
    """

    def __init__(self, name: str, reader: Reader | None = None) -> None:
        self._name = name
        self._own = reader
        self._counts: list[int] | None = None
        self._stores: dict[tuple[str, ...], Store] = {}

    @property
    def _reader(self) -> Reader:
        if self._own is None:
            data = context.data
            reader = pickle.loads(data.readers)[self._name]  # noqa: S301 - from our own driver
            if isinstance(reader, Spilled):
                told = data.pieces[self._name]
                reader, self._counts = reader.on(place()[0], told, run_folder())
            self._own = reader
        return self._own

    @property
    def rows(self) -> int:
        """Of the whole dataset, on all ranks."""
        units = self._reader.units
        return sum(units if self._counts is None else self._counts)

    @property
    def columns(self) -> list[str]:
        """Their names; those of a struct's fields are dotted."""
        return list(self._reader.columns)

    def __repr__(self) -> str:
        return f"Shard({self._name}: {self.rows} rows of {', '.join(self.columns)})"

    def batches(
        self,
        batch_size: int,
        columns: Columns | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last: Last = "pad",
        dtypes: Mapping[str, str] | str | None = None,
        pad: Pad | None = None,
        transform: Transform | None = None,
        prefetch: int = 1,
    ) -> Feed[Any]:
        """Batches as dicts of NumPy arrays.

        Args:
            batch_size: rows of a batch, on each rank.
            columns: what a batch holds, by name: one column, of shape (rows, ...), or several
                side by side, of shape (rows, columns). A list of names takes each by itself, None
                takes all. Text and bytes are lists, as are ragged columns that ``pad`` leaves out.
            shuffle: in an order of its own in each epoch.
            seed: of the shuffling; the same one on all ranks.
            last: "pad" fills the last batch up with rows that were there before (``real`` counts
                the others), "drop" leaves out rows that fill no batch on every rank.
            dtypes: NumPy types to turn numbers into, by name or one for all.
            pad: for ragged columns: a number to fill short rows up with to the longest of the
                batch, or (number, length).
            transform: called with each batch, in the thread that reads ahead; what it returns
                comes in the batch's place.
            prefetch: how many chunks of batches, of 4 MB each, are made ahead.

        Raises:
            DataError: see :class:`~horovod_runner.DataError`.
        """

        def make(names: list[str], values: list[Any]) -> list[Any]:
            found = [dict(zip(names, one, strict=True)) for one in zip(*values, strict=True)]
            return found if transform is None else [transform(batch) for batch in found]

        plan = self._plan(
            batch_size,
            columns,
            shuffle=shuffle,
            seed=seed,
            last=last,
            dtypes=dtypes,
            pad=pad,
        )
        return Feed(plan, make, prefetch)

    def to_torch(  # noqa: D417 - see batches
        self,
        batch_size: int,
        columns: Columns | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last: Last = "pad",
        dtypes: Mapping[str, str] | str | None = None,
        pad: Pad | None = None,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        prefetch: int = 1,
    ) -> Feed[Any]:
        """Batches as tuples of tensors in the order of ``columns``; dicts where that is no mapping.

        All arguments but one are those of :meth:`batches`.

        Args:
            device: where the tensors are wanted. None: on this rank's GPU if there is one: copied
                from pinned memory while the batch before is in use.
        """
        from horovod_runner.data import torch_feed

        as_tuple = isinstance(columns, Mapping)
        plan = self._plan(
            batch_size,
            columns,
            shuffle=shuffle,
            seed=seed,
            last=last,
            dtypes=dtypes,
            pad=pad,
        )
        return Feed(plan, torch_feed.Make(as_tuple, transform, device), prefetch)

    def to_tf(  # noqa: D417 - see batches
        self,
        batch_size: int,
        columns: Columns | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last: Last = "pad",
        dtypes: Mapping[str, str] | str | None = None,
        pad: Pad | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> tf.data.Dataset:
        """Batches as a ``tf.data.Dataset``: tuples in the order of ``columns``, or dicts.

        Each iteration is an epoch. All arguments but one are those of :meth:`batches`.

        Args:
            state: of a feed with the same arguments: the first epoch goes on there.
        """
        from horovod_runner.data import tf_feed

        plan = self._plan(
            batch_size,
            columns,
            shuffle=shuffle,
            seed=seed,
            last=last,
            dtypes=dtypes,
            pad=pad,
        )
        feed = Feed(plan, lambda names, values: list(zip(*values, strict=True)))
        if state is not None:
            feed.load_state_dict(state)
        if all(field.is_uniform and field.columns[0].is_fixed for field in plan.fields):
            dataset = tf_feed.gathered(feed, plan.store, plan.fields, batch_size)
        else:
            dataset = tf_feed.through_python(feed, plan.fields, batch_size)
        return tf_feed.finished(
            dataset,
            None if isinstance(columns, Mapping) else [field.name for field in plan.fields],
            None if state is not None else len(feed),
        )

    def _plan(
        self,
        batch_size: int,
        columns: Columns | None,
        *,
        shuffle: bool,
        seed: int,
        last: Last,
        dtypes: Mapping[str, str] | str | None,
        pad: Pad | None,
    ) -> Plan:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        if not self.rows:
            raise DataError(f"{self._name} has no rows")
        there = self._reader.columns
        names = names_of(there, columns)
        settled = self._reader.settle(names)
        there = {**there, **{column.name: column for column in settled}}
        fields = fields_of(there, columns, dtypes, pad)
        store = self._store(names, settled)
        rank, size = place()
        global_batch = batch_size * size
        state = {
            "data": self._reader.fingerprint,
            "global_batch": global_batch,
            "seed": seed,
            "shuffle": shuffle,
            "last": last,
        }
        order: Order | OwnOrder
        if self._counts is None:
            order = Order(self.rows, global_batch, seed=seed, shuffle=shuffle, last=last)
        else:
            order = OwnOrder(self._counts, batch_size, rank, seed=seed, shuffle=shuffle, last=last)
            state["ranks"] = size
        return Plan(store, order, (rank, size), fields, state)

    def _store(self, names: Sequence[str], columns: list[Column]) -> Store:
        """The packed dataset with these columns; made by whoever comes first."""
        for known, store in self._stores.items():
            if set(names) <= set(known):
                return store
        layout = Layout(columns, self._reader.units, self._reader.fingerprint)
        # Ranks that have rows of their own have stores of their own.
        own = None if self._counts is None else place()[0]
        told = repr((layout.fingerprint, layout.columns, own)).encode()
        name = hashlib.blake2b(told, digest_size=8).hexdigest()
        store = Store.create(run_folder() / name, layout)
        store.fill(lambda unit: self._reader.chunks(unit, layout))
        store.open()
        self._stores[tuple(names)] = store
        return store

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}


def place() -> tuple[int, int]:
    """This rank's number and the number of ranks; rank 0 of 1 outside of a run."""
    return int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))


def run_folder() -> Path:
    """The run's folder on this host; outside of a run this process has one of its own."""
    path = os.environ.get(VARIABLE)
    if not path:
        stack = ExitStack()
        path = str(stack.enter_context(RunFolder(f"process-{os.getpid()}")).path)
        atexit.register(stack.close)
        os.environ[VARIABLE] = path
    return Path(path)
