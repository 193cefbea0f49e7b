"""A dataset on the disk of a rank's host: what a Shard packs, and the plan of its batches."""

from __future__ import annotations

import hashlib
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from horovod_runner.data.feed.epochs import Epochs
from horovod_runner.data.feed.feed import Plan
from horovod_runner.data.feed.fields import Field, fields_of, names_of
from horovod_runner.data.feed.options import WEIGHT, FeedOptions
from horovod_runner.data.feed.order import LastBatch, Order, PerRankOrder
from horovod_runner.data.pack.columns import Array, Column
from horovod_runner.data.pack.layout import Layout
from horovod_runner.data.pack.store import Store
from horovod_runner.data.place import place, run_folder
from horovod_runner.data.read.decoded import Decoded
from horovod_runner.data.read.readers import Deferred, Reader, name_in_errors
from horovod_runner.errors import DataError
from horovod_runner.worker import context
from horovod_runner.worker.api import log_to_driver
from horovod_runner.worker.profiling.clock import clock

_PROGRESS_SECONDS = 20.0


@dataclass(frozen=True)
class _Packed:
    """What a user asked for, on this host's disk."""

    store: Store
    fields: list[Field]


class PackedDataset:
    """Packs a dataset once on each host, by all ranks that ask for its columns.

    Args:
        name: name of the argument of ``run``.
        reader: the dataset; None in the object that is sent to the ranks, which get it by itself.
    """

    def __init__(self, name: str, reader: Reader | Deferred | None = None) -> None:
        self._name = name
        self._given = reader
        self._resolved: Reader | None = None
        self._counts: list[int] | None = None  # rows of each rank, if each has rows of its own
        self._stores: dict[tuple[tuple[str, ...], str], Store] = {}
        self._epochs = Epochs(name)

    @property
    def _reader(self) -> Reader:
        if self._resolved is None:
            rank, reader = context.current(), self._given
            if reader is None:
                if rank is None or not rank.readers:
                    raise DataError(
                        f"{self._name} is one rank's part of a dataset: use a Shard only inside "
                        "main, and return results instead of it"
                    )
                reader = pickle.loads(rank.readers)[self._name]  # noqa: S301 - from our own driver
            if isinstance(reader, Deferred):
                pieces = () if rank is None else rank.pieces.get(self._name, ())
                reader, self._counts = reader.resolve(place()[0], pieces, run_folder())
            self._resolved = reader
        return self._resolved

    @property
    def rows(self) -> int:
        """Rows of the whole dataset, on all ranks."""
        units = self._reader.units
        return sum(units if self._counts is None else self._counts)

    @property
    def columns(self) -> list[str]:
        """Names of the columns; fields of a struct have dotted names."""
        return list(self._reader.columns)

    def __repr__(self) -> str:
        try:
            return f"Shard({self._name}: {self.rows} rows of {', '.join(self.columns)})"
        except Exception:  # outside main, or its data cannot be read: a method says why
            return f"Shard({self._name})"

    def _packed(self, options: FeedOptions) -> _Packed:
        """Pack what a user asked for on this host, unless it is packed already."""
        if not self.rows:
            raise DataError(f"{self._name} has no rows: check its filter or query")
        # Pixels are packed in one layout, whichever the batches have.
        cached = {
            name: replace(image, layout=None)
            for name, image in (options.images or {}).items()
            if image.cache
        }
        reader: Reader = Decoded(self._reader, cached) if cached else self._reader
        with name_in_errors(self._name):
            available = reader.columns
            names = names_of(available, options)
            settled = reader.settle(names)
            available = {**available, **{column.name: column for column in settled}}
            fields = fields_of(available, options)
            store = self._store(reader, names, settled, repr(cached) if cached else "")
            return _Packed(store, fields)

    def _plan(self, options: FeedOptions) -> Plan:
        rank, size = place()
        global_batch = options.rows_per_step(size)
        if options.global_batch is not None:
            self._refuse_rows_of_ranks(
                f"global_batch={options.global_batch} promises the same steps for any np"
            )
        packed = self._packed(options)
        if options.has_weights and any(field.name == WEIGHT for field in packed.fields):
            raise DataError(
                f"sample_weights=True adds a part {WEIGHT!r}, and there is one of that name: name "
                f"yours differently, columns={{'own_weight': {WEIGHT!r}, ...}}"
            )
        how: dict[str, Any] = {
            "seed": options.seed,
            "shuffle": options.shuffle,
            "last_batch": options.how_last,
        }
        state = {"data": self._reader.fingerprint, "global_batch": global_batch, **how}
        order: Order | PerRankOrder
        if self._counts is None:
            order = Order(self.rows, global_batch, **how)
        else:
            order = PerRankOrder(self._counts, global_batch // size, rank, **how)
            state["ranks"] = size
        if not order.steps:
            raise DataError(
                f"{self._name} has {self.rows} rows, and a step over {size} ranks takes "
                f"{global_batch}: last_batch='drop' leaves none. Make the batch smaller, or use "
                "last_batch='pad'"
            )
        return Plan(options, packed.store, order, (rank, size), packed.fields, state, self._epochs)

    def _refuse_rows_of_ranks(self, why: str) -> None:
        if self.rows and self._counts is not None:
            raise DataError(
                f"{self._name} is split among the ranks: each has only rows of its own, as many as "
                f"np decides, and {why}. Leave that argument out (with batch_size for batches); or "
                "let all ranks read all rows, with data_config=DataConfig(shared_dir=...) on a "
                "disk that all hosts share, or with Parquet files"
            )

    def _rows_for_good(self, last_batch: LastBatch) -> Array:
        """The numbers of the rows that this rank has in all epochs, in its store."""
        rank, size = place()
        if self._counts is None:
            count = self.rows // size if last_batch == "drop" else -(-self.rows // size)
            return (np.arange(count) * size + rank) % self.rows
        count = min(self._counts) if last_batch == "drop" else max(self._counts)
        return np.arange(count) % max(1, self._counts[rank])

    def _store(
        self, reader: Reader, names: Sequence[str], columns: list[Column], images: str
    ) -> Store:
        """The packed dataset with some columns, packed by the ranks that ask for it first.

        Args:
            reader: reads the rows.
            names: names of the columns.
            columns: the columns.
            images: describes the images that are decoded.
        """
        for (known, decoded), store in self._stores.items():
            if set(names) <= set(known) and decoded == images:
                return store
        layout = Layout(columns, reader.units, reader.fingerprint)
        # Ranks that have rows of their own have stores of their own.
        rank = None if self._counts is None else place()[0]
        content = repr((layout.fingerprint, layout.columns, rank, images)).encode()
        name = hashlib.blake2b(content, digest_size=8).hexdigest()
        store = Store.create(run_folder() / name, layout)
        with clock.timing("data"), clock.stage("pack"):
            store.fill(lambda unit: reader.chunks(unit, layout), self._report_progress())
        pa.default_memory_pool().release_unused()  # batches need none of it
        store.open()
        self._stores[tuple(names), images] = store
        return store

    def _report_progress(self) -> Callable[[int, int], None]:
        """Tell the user how far a long packing is, as it could be taken for a hang."""
        host, last = socket.gethostname(), time.monotonic()

        def done(complete: int, units: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _PROGRESS_SECONDS:
                last = time.monotonic()
                log_to_driver(f"{self._name}: {complete} of {units} parts packed on {host}")

        return done

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}
