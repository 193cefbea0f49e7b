"""Shard: a dataset as ``main`` gets it, packed on this host's disk, and the feeds made from it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from horovod_runner.common.arguments import parameters_of, suggest_arguments
from horovod_runner.data.feed.epochs import Epochs
from horovod_runner.data.feed.feed import Feed, Plan, dicts_of
from horovod_runner.data.feed.fields import Field, fields_of, names_of
from horovod_runner.data.feed.options import (
    ALIASES,
    OF_LOADER,
    OF_TF_DATASET,
    WEIGHT,
    BatchArguments,
    Columns,
    FeedArguments,
    FeedOptions,
    RowArguments,
    Transform,
)
from horovod_runner.data.feed.order import Order, PerRankOrder, rows_of_rank
from horovod_runner.data.feed.part import Part, check_validation, divide
from horovod_runner.data.pack.columns import Array
from horovod_runner.data.pack.store import PackedStore
from horovod_runner.data.place import place, run_folder
from horovod_runner.data.read.decoded import Decoded
from horovod_runner.data.read.readers import Deferred, Reader, name_in_errors
from horovod_runner.data.stores import Stores
from horovod_runner.errors import DataError
from horovod_runner.worker import context

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

_OF_ROWS = parameters_of(RowArguments, FeedOptions)
_OF_BATCHES = parameters_of(BatchArguments, FeedOptions)
_OF_FEEDS = parameters_of(FeedArguments, FeedOptions)


class Shard:
    """A dataset in ``main``: its methods give this rank's part of it.

    The columns that are asked for are packed once on each host, by all ranks that ask for them.
    From then on a batch is one gather from a memory-mapped file.

    Args:
        name: name of the argument of ``run``.
        reader: the dataset; None in the object that is sent to the ranks, which get it by itself.
    """

    def __init__(self, name: str, reader: Reader | Deferred | None = None) -> None:
        self._name = name
        self._given = reader
        self._resolved: Reader | None = None
        self._counts: list[int] | None = None  # rows of each rank, if each has rows of its own
        self._stores = Stores(name)
        self._epochs = Epochs(name)
        self._parts: list[Part] | None = None  # of a split: one for each of _sizes
        self._how = ""  # how the parts were chosen; a saved state has it

    @property
    def rows(self) -> int:
        """Rows of the dataset on all ranks."""
        return sum(self._sizes)

    def split(self, validation: float | str, *, seed: int = 0) -> tuple[Shard, Shard]:
        """Divide the rows into those to train with and those to validate with.

        All ranks get the same division, with any number of ranks. The data are packed once.

        Args:
            validation: a fraction of the rows, chosen at random; or the name of a column that is
                True, or not 0, in the rows to validate with. More than 65,536 rows are chosen in
                blocks of 128 neighbouring ones.
            seed: of the choice of a fraction.

        Returns:
            The rows to train with, and those to validate with.

        Raises:
            DataError: there is no such column, it does not hold numbers, or one of the two has no
                rows.
            TypeError: ``validation`` is neither a number nor a text.
            ValueError: it is a number that is not between 0 and 1; or the rows were split before.
        """
        check_validation(validation)
        if self._parts is not None:
            raise ValueError(f"{self._name} is one part of a split: split the whole dataset")
        both = self._divided(validation, seed)
        train, valid = (copy.copy(self) for _ in both)  # the packed stores are shared
        for shard, parts, name in ((train, both[0], "train"), (valid, both[1], "valid")):
            shard._name, shard._parts = f"{self._name}.{name}", parts
            shard._epochs = Epochs(shard._name)
            shard._how = f"{name} of {validation!r}, seed {seed}"
            if not shard.rows:
                raise DataError(
                    f"validation={validation!r} leaves none of the {self.rows} rows of "
                    f"{self._name} to {'train' if shard is train else 'validate'} with: choose "
                    "another fraction or column"
                )
        return train, valid

    def _divided(self, validation: float | str, seed: int) -> tuple[list[Part], list[Part]]:
        """The parts of a split: one for each rank if Spark divided the rows, otherwise one."""
        sizes = self._sizes
        if isinstance(validation, str):
            self._refuse_rows_of_ranks(
                f"validation={validation!r} names a column that only a rank of its own can read"
            )
            chosen = self._values_of(validation) != 0
            return [Part.where(~chosen)], [Part.where(chosen)]
        pairs = [divide(rows, validation, seed + rank) for rank, rows in enumerate(sizes)]
        left, taken = zip(*pairs, strict=True)
        return list(left), list(taken)

    def _values_of(self, column: str) -> Array:
        """The numbers in a column, of all rows."""
        options = FeedOptions(framework="numpy", columns=[column])
        store, (field,) = self._packed(options)
        if not field.columns[0].is_fixed or field.row_shape:
            raise DataError(
                f"validation={column!r} names a column of {self._name} that does not hold one "
                "number for each row: it must be true, or not 0, in the rows to validate with"
            )
        values: Array = field.of(store.take(np.arange(self.rows), [column]))
        return values

    @property
    def _sizes(self) -> list[int]:
        """Numbers of rows: one for each rank if Spark divided the rows, otherwise one for all."""
        if self._parts is not None:
            return [part.rows for part in self._parts]
        units = self._reader.units
        return [sum(units)] if self._counts is None else self._counts

    @property
    def is_split_among_ranks(self) -> bool:
        """Whether Spark divided the rows of a DataFrame, so that each rank has only a part of them.

        Such a dataset has no batches with ``global_batch``.
        """
        return bool(self._reader.units) and self._counts is not None

    @property
    def _part(self) -> Part | None:
        """Which rows of this rank's store belong to this shard; None for all."""
        if self._parts is None:
            return None
        return self._parts[0 if self._counts is None else place()[0]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that can become tensors.

        Fields of a struct have dotted names, and "m.*" stands for the values of a map's keys.
        """
        return self._reader.columns.listed

    def __repr__(self) -> str:
        try:
            return f"Shard({self._name}: {self.rows} rows of {', '.join(self.columns)})"
        except Exception:  # outside main, or its data cannot be read: a method says why
            return f"Shard({self._name})"

    @suggest_arguments(ALIASES, options=_OF_FEEDS)
    def batches(
        self,
        batch_size: int | None = None,
        columns: Columns | None = None,
        **options: Unpack[FeedArguments],
    ) -> Feed[Any]:
        """Batches as dicts of NumPy arrays, with the types that the dataset has.

        Args:
            batch_size: rows per batch on each rank. A step has np x batch_size rows over all ranks.
                Pass either this or ``global_batch``.
            columns: the parts of a batch: a dict of names to one column, of shape (batch_size,
                ...), or to a list of columns side by side, of shape (batch_size, columns). A list
                of names makes each column a part, and None all columns. Text and bytes are lists,
                as are ragged columns without ``pad_ragged``.
            options: see :class:`~horovod_runner.data.feed.options.RowArguments`,
                :class:`~horovod_runner.data.feed.options.BatchArguments` and
                :class:`~horovod_runner.data.feed.options.FeedArguments`.

        Returns:
            A feed. Each iteration over it is the next epoch, also if it is made anew in each epoch.

        Raises:
            DataError: a column does not exist or cannot be converted, it has nulls, the disk has
                too little room, or ``global_batch`` is given and each rank has rows of its own.
            TypeError: an argument has the wrong type, or not exactly one of ``batch_size`` and
                ``global_batch`` is given.
            ValueError: an argument is out of range.
        """
        made = FeedOptions(framework="numpy", batch_size=batch_size, columns=columns, **options)
        return Feed(self._plan(made), dicts_of(made.transform))

    @suggest_arguments(ALIASES, options=_OF_FEEDS)
    def to_torch(
        self,
        batch_size: int | None = None,
        columns: Columns | None = None,
        *,
        device: torch.device | str | None = None,
        **options: Unpack[FeedArguments],
    ) -> Feed[Any]:
        """Batches as tuples of tensors if ``columns`` is a dict, otherwise as dicts of tensors.

        float64 becomes float32, and images have the shape (batch_size, channels, height, width).
        With ``global_batch``, every ``backward()`` during a loop over the feed is weighted by the
        ``weight`` of its batch, so that a step of an optimizer that averages gradients equals that
        of one process. ``sample_weights=True`` leaves ``backward()`` as it is: multiply the losses
        per row by the weights. Keras does.

        Args:
            batch_size: as in :meth:`batches`.
            columns: as in :meth:`batches`.
            device: where the tensors go. None: this rank's GPU if there is one, copied from pinned
                memory while the batch before is in use; otherwise the CPU. A batch is ready for the
                stream that is current when the loop takes it.
            options: as in :meth:`batches`.
        """
        made = FeedOptions(
            framework="torch", batch_size=batch_size, columns=columns, device=device, **options
        )
        from horovod_runner.data.feed import gradients, torch_feed

        weighted = made.global_batch is not None and not made.has_weights and place()[1] > 1
        kind = gradients.WeightedFeed if weighted else Feed
        return kind(self._plan(made), torch_feed.Make(made))

    @suggest_arguments(ALIASES, lambda: OF_LOADER, _OF_ROWS)
    def to_torch_dataset(
        self,
        columns: Columns | None = None,
        *,
        transform: Transform | None = None,
        whole: bool = False,
        **options: Unpack[RowArguments],
    ) -> torch.utils.data.Dataset[Any]:
        """This rank's rows, one by one, for a ``DataLoader``.

        Rank r of n has the rows r, r + n, r + 2n, ... in all epochs, and every rank has the same
        number: ``last_batch="pad"``, or None, repeats rows so that every row is on some rank, and
        "drop" leaves out the rows that are too many. float64 becomes float32, and images have the
        shape (channels, height, width).

        Args:
            columns: as in :meth:`batches`, for rows instead of batches.
            transform: called with each row, in the DataLoader's workers if it has some.
            whole: give all rows to each rank, for what divides them among the ranks itself: the
                Trainer of Hugging Face, a DataLoader that Accelerate prepares, a
                ``DistributedSampler``.
            options: see :class:`~horovod_runner.data.feed.options.RowArguments`.

        Raises:
            DataError: ``whole`` is given and each rank has only rows of its own; or as for
                :meth:`batches`.
            ValueError: ``whole`` and ``last_batch`` are both given; or as for :meth:`batches`.
        """
        made = FeedOptions(
            framework="torch", columns=columns, transform=transform, whole=whole, **options
        )
        from horovod_runner.data.feed import torch_feed

        if whole:
            self._refuse_rows_of_ranks("whole=True gives all rows to each rank")
        store, fields = self._packed(made)
        if whole:
            rows = np.arange(self.rows)
        else:
            shared = self._counts is None
            rows = rows_of_rank(self._sizes, *place(), made.how_last, shared=shared)
        all_rows = self.rows if self._counts is None else None
        return torch_feed.RowDataset(store, fields, rows, made, part=self._part, all_rows=all_rows)

    @suggest_arguments(ALIASES, lambda: OF_TF_DATASET, _OF_BATCHES)
    def to_tf(
        self,
        batch_size: int | None = None,
        columns: Columns | None = None,
        *,
        start: int = 0,
        **options: Unpack[BatchArguments],
    ) -> tf.data.Dataset:
        """Batches as a ``tf.data.Dataset``: of tuples if ``columns`` is a dict, otherwise of dicts.

        Each iteration is an epoch. float64 becomes float32, and images have the shape (batch_size,
        height, width, channels). All batches have the same shape: with ``global_batch`` repeated
        rows fill up parts that have fewer, with the weight 0.

        Args:
            batch_size: as in :meth:`batches`.
            columns: as in :meth:`batches`.
            start: number of batches to skip, counted over all epochs: the first iteration begins
                after them.
            options: see :class:`~horovod_runner.data.feed.options.RowArguments` and
                :class:`~horovod_runner.data.feed.options.BatchArguments`.
        """
        made = FeedOptions(
            framework="tensorflow", batch_size=batch_size, columns=columns, start=start, **options
        )
        from horovod_runner.data.feed import tf_feed

        return tf_feed.dataset_of(self._plan(made))

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

    def _packed(self, options: FeedOptions) -> tuple[PackedStore, list[Field]]:
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
            available = available.changed(settled)
            fields = fields_of(available, options)
            # If Spark divided the rows, each rank packs its part into a store.
            rank = None if self._counts is None else place()[0]
            store = self._stores.of(reader, names, settled, repr(cached) if cached else "", rank)
            return store, fields

    def _plan(self, options: FeedOptions) -> Plan:
        rank, size = place()
        global_batch = options.rows_per_step(size)
        if options.global_batch is not None:
            self._refuse_rows_of_ranks(
                f"global_batch={options.global_batch} promises the same steps for any np"
            )
        store, fields = self._packed(options)
        if options.has_weights and any(field.name == WEIGHT for field in fields):
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
        if self._part is not None:
            state["part"] = self._how
        order: Order | PerRankOrder
        if self._counts is None:
            order = Order(self.rows, global_batch, **how)
        else:
            order = PerRankOrder(self._sizes, global_batch // size, rank, **how)
            state["ranks"] = size
        if not order.steps:
            raise DataError(
                f"{self._name} has {self.rows} rows, and a step over {size} ranks takes "
                f"{global_batch}: last_batch='drop' leaves none. Make the batch smaller, or use "
                "last_batch='pad'"
            )
        return Plan(options, store, order, (rank, size), fields, self._part, state, self._epochs)

    def _refuse_rows_of_ranks(self, why: str) -> None:
        if self.rows and self._counts is not None:
            raise DataError(
                f"{self._name} is split among the ranks: each has only rows of its own, as many as "
                f"np decides, and {why}. Leave that argument out (with batch_size for batches); or "
                "let all ranks read all rows, with data_config=DataConfig(shared_dir=...) on a "
                "disk that all hosts share, or with Parquet files"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": Stores(self._stores.name)}
