"""The packed stores of a dataset on this host."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from horovod_runner.data.pack.columns import Column
from horovod_runner.data.pack.layout import Layout, fingerprint_of
from horovod_runner.data.pack.store import PackedStore
from horovod_runner.data.place import run_folder
from horovod_runner.data.read.readers import Reader
from horovod_runner.worker.api import log_to_driver
from horovod_runner.worker.profiling.clock import clock

_PROGRESS_SECONDS = 20.0


class Stores:
    """The stores of a dataset, by their columns.

    Attributes:
        name: the dataset's; parts of a split have that of the whole.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: dict[tuple[tuple[str, ...], str], PackedStore] = {}

    def of(
        self,
        reader: Reader,
        names: Sequence[str],
        columns: list[Column],
        images: str,
        rank: int | None,
    ) -> PackedStore:
        """The packed dataset with some columns, packed by the ranks that ask for it first.

        ``images`` describes those that are decoded. ``rank`` is this one if all rows are its own.
        """
        for (known, decoded), store in self._made.items():
            if set(names) <= set(known) and decoded == images:
                return store
        layout = Layout(columns, reader.units)
        # Its own name, too: files of two folders may have one name, size and time of change.
        about = (self.name, reader.fingerprint, columns, rank, images)
        name = fingerprint_of(repr(about))
        store = PackedStore.create(run_folder() / name, layout)
        with clock.timing("data"), clock.stage("pack"):
            store.fill(lambda unit: reader.chunks(unit, layout), self._report_progress())
        pa.default_memory_pool().release_unused()  # batches need none of it
        store.open()
        self._made[tuple(names), images] = store
        return store

    def _report_progress(self) -> Callable[[int, int], None]:
        """Tell the user how far a long packing is, as it could be taken for a hang."""
        host, last = socket.gethostname(), time.monotonic()

        def done(complete: int, units: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _PROGRESS_SECONDS:
                last = time.monotonic()
                log_to_driver(f"{self.name}: {complete} of {units} parts packed on {host}")

        return done
