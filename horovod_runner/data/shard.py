"""What a dataset is inside ``main``: this rank's part of it."""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from horovod_runner import context
from horovod_runner.data.columns import Array, Column
from horovod_runner.data.decoded import Decoded
from horovod_runner.data.feed import WEIGHT, Feed, Plan
from horovod_runner.data.fields import Columns, Field, Pad, fields_of, names_of
from horovod_runner.data.images import Image
from horovod_runner.data.order import Last, Order, OwnOrder
from horovod_runner.data.readers import Deferred, Reader, named
from horovod_runner.data.store import Layout, Store
from horovod_runner.errors import DataError
from horovod_runner.folder import VARIABLE, RunFolder

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

_TELL_SECONDS = 20.0
Transform: TypeAlias = Callable[[dict[str, Any]], Any]
Dtypes: TypeAlias = Mapping[str, str] | str


@dataclass(frozen=True)
class _Packed:
    """What was asked for, on this host's disk."""

    store: Store
    fields: list[Field]


class Shard:
    """A dataset as ``main`` gets it: every method gives this rank's part.

    What is asked for is packed once on each host, by all ranks that ask for it; from then on a
    batch is one gather.

    Args:
        name: that of the argument of ``run``.
        reader: the source; None in what is sent to the ranks, which get it apart.
    """

    def __init__(self, name: str, reader: Reader | Deferred | None = None) -> None:
        self._name = name
        self._given = reader
        self._own: Reader | None = None
        self._counts: list[int] | None = None
        self._stores: dict[tuple[tuple[str, ...], str], Store] = {}

    @property
    def _reader(self) -> Reader:
        if self._own is None:
            data, reader = context.data, self._given
            if reader is None:
                if not data.readers:
                    raise DataError(
                        f"{self._name} is one rank's part of a dataset, and can be used inside "
                        "main alone: give back what comes of it"
                    )
                reader = pickle.loads(data.readers)[self._name]  # noqa: S301 - from our own driver
            if isinstance(reader, Deferred):
                told = data.pieces.get(self._name, ())
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
        dtypes: Dtypes | None = None,
        pad: Pad | None = None,
        images: Mapping[str, Image] | None = None,
        weights: bool = False,
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
            images: for columns of images, what they are decoded to.
            weights: add a part "weight" behind the others, of shape (rows,): 1.0 for each row, and
                0.0 for what fills the last batch up. Keras takes it as sample weights.
            transform: called with each batch, in the thread that reads ahead; what it returns
                comes in the batch's place.
            prefetch: how many chunks of batches, of 3 MB each, are made ahead.

        Raises:
            DataError: see :class:`~horovod_runner.DataError`.
        """

        def make(names: list[str], values: list[Any]) -> list[Any]:
            found = [dict(zip(names, one, strict=True)) for one in zip(*values, strict=True)]
            return found if transform is None else [transform(batch) for batch in found]

        packed = self._packed(columns, dtypes, pad, images)
        return Feed(
            self._plan(packed, batch_size, shuffle=shuffle, seed=seed, last=last, weights=weights),
            make,
            prefetch,
            is_helped=transform is None,
        )

    def to_torch(  # noqa: D417 - see batches
        self,
        batch_size: int,
        columns: Columns | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last: Last = "pad",
        dtypes: Dtypes | None = None,
        pad: Pad | None = None,
        images: Mapping[str, Image] | None = None,
        weights: bool = False,
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

        packed = self._packed(columns, dtypes, pad, images)
        plan = self._plan(
            packed, batch_size, shuffle=shuffle, seed=seed, last=last, weights=weights
        )
        make = torch_feed.Make(isinstance(columns, Mapping), transform, device)
        return Feed(plan, make, prefetch, is_helped=transform is None)

    def to_torch_dataset(  # noqa: D417 - see batches
        self,
        columns: Columns | None = None,
        *,
        last: Last = "pad",
        dtypes: Dtypes | None = None,
        pad: Pad | None = None,
        images: Mapping[str, Image] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> torch.utils.data.Dataset[Any]:
        """This rank's rows, each by itself, for a ``DataLoader`` of your own.

        Rank r of n has the rows r, r + n, r + 2n, ... in all epochs; every rank has as many. The
        arguments are those of :meth:`batches`, but that rows take the place of batches.

        Args:
            last: "pad" repeats rows so that all are on some rank, "drop" leaves rows out.
            transform: called with each row, in the DataLoader's workers where it has some.
        """
        from horovod_runner.data import torch_feed

        packed = self._packed(columns, dtypes, pad, images)
        as_tuple = isinstance(columns, Mapping)
        rows = self._own_rows(last)
        return torch_feed.RowDataset(packed.store, packed.fields, rows, as_tuple, transform)

    def to_tf(  # noqa: D417 - see batches
        self,
        batch_size: int,
        columns: Columns | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last: Last = "pad",
        dtypes: Dtypes | None = None,
        pad: Pad | None = None,
        images: Mapping[str, Image] | None = None,
        weights: bool = False,
        start: int = 0,
    ) -> tf.data.Dataset:
        """Batches as a ``tf.data.Dataset``: tuples in the order of ``columns``, or dicts.

        Each iteration is an epoch. All arguments but one are those of :meth:`batches`.

        Args:
            start: how many batches were taken before, of all epochs together: the first iteration
                begins behind them.
        """
        from horovod_runner.data import tf_feed

        packed = self._packed(columns, dtypes, pad, images)
        plan = self._plan(
            packed, batch_size, shuffle=shuffle, seed=seed, last=last, weights=weights
        )
        return tf_feed.dataset_of(plan, batch_size, isinstance(columns, Mapping), start)

    def _packed(
        self,
        columns: Columns | None,
        dtypes: Dtypes | None,
        pad: Pad | None,
        images: Mapping[str, Image] | None,
    ) -> _Packed:
        """What a user asked for, packed on this host."""
        if not self.rows:
            raise DataError(f"{self._name} has no rows")
        kept = {name: image for name, image in (images or {}).items() if image.cache}
        others = {name: image for name, image in (images or {}).items() if not image.cache}
        reader: Reader = Decoded(self._reader, kept) if kept else self._reader
        with named(self._name):
            there = reader.columns
            names = names_of(there, columns, others)
            settled = reader.settle(names)
            there = {**there, **{column.name: column for column in settled}}
            fields = fields_of(there, columns, dtypes, pad, others)
            return _Packed(self._store(reader, names, settled, repr(kept) if kept else ""), fields)

    def _plan(
        self,
        packed: _Packed,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        last: Last,
        weights: bool,
    ) -> Plan:
        if not isinstance(batch_size, int | np.integer):
            raise TypeError(f"batch_size must be a whole number, not {batch_size!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        if weights and any(field.name == WEIGHT for field in packed.fields):
            raise DataError(
                f"weights=True adds a part {WEIGHT!r}, and there is one: call yours otherwise, "
                f"columns={{'own_weight': {WEIGHT!r}, ...}}"
            )
        if last not in get_args(Last):
            raise ValueError(f"last must be 'pad' or 'drop', not {last!r}")
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
        if not order.steps:
            raise DataError(
                f"{self._name} has {self.rows} rows, and a batch on each of {size} ranks takes "
                f"{global_batch}: last='drop' leaves none. Make batch_size smaller, or use "
                "last='pad'"
            )
        return Plan(packed.store, order, (rank, size), packed.fields, weights, state)

    def _own_rows(self, last: Last) -> Array:
        """The numbers of the rows that this rank has for good, in its store."""
        rank, size = place()
        if self._counts is None:
            count = self.rows // size if last == "drop" else -(-self.rows // size)
            return (np.arange(count) * size + rank) % self.rows
        count = min(self._counts) if last == "drop" else max(self._counts)
        return np.arange(count) % max(1, self._counts[rank])

    def _store(
        self, reader: Reader, names: Sequence[str], columns: list[Column], how: str
    ) -> Store:
        """The packed dataset with these columns; made by whoever comes first."""
        for (known, made), store in self._stores.items():
            if set(names) <= set(known) and made == how:
                return store
        layout = Layout(columns, reader.units, reader.fingerprint)
        # Ranks that have rows of their own have stores of their own.
        own = None if self._counts is None else place()[0]
        told = repr((layout.fingerprint, layout.columns, own, how)).encode()
        name = hashlib.blake2b(told, digest_size=8).hexdigest()
        store = Store.create(run_folder() / name, layout)
        store.fill(lambda unit: reader.chunks(unit, layout), self._tell_progress())
        pa.default_memory_pool().release_unused()  # no batch needs any of it
        store.open()
        self._stores[tuple(names), how] = store
        return store

    def _tell_progress(self) -> Callable[[int, int], None]:
        """Lets the user know where long packing is, which a hang could look like."""
        host, told = socket.gethostname(), time.monotonic()

        def done(there: int, units: int) -> None:
            nonlocal told
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                context.log_to_driver(f"{self._name}: {there} of {units} parts packed on {host}")

        return done

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
