"""Shard: a dataset as ``main`` gets it, and the feeds that it makes for this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from horovod_runner.common.arguments import suggest_arguments
from horovod_runner.data.dataset import PackedDataset
from horovod_runner.data.feed.feed import Feed, dicts_of
from horovod_runner.data.feed.options import (
    ALIASES,
    OF_LOADER,
    OF_TF_DATASET,
    Columns,
    Dtypes,
    FeedOptions,
    PadRagged,
    Transform,
)
from horovod_runner.data.pack.images import Image
from horovod_runner.data.place import place

if TYPE_CHECKING:
    import tensorflow as tf
    import torch


class Shard(PackedDataset):
    """A dataset in ``main``: its methods give this rank's part of it.

    The columns that are asked for are packed once on each host, by all ranks that ask for them.
    From then on a batch is one gather from a memory-mapped file.

    Args:
        name: name of the argument of ``run``.
        reader: the dataset; None in the object that is sent to the ranks, which get it by itself.
    """

    @suggest_arguments(ALIASES)
    def batches(
        self,
        batch_size: int | None = None,
        columns: Columns | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: Literal["pad", "drop", "short"] | None = None,
        dtypes: Dtypes | None = None,
        pad_ragged: PadRagged | None = None,
        images: Mapping[str, Image] | None = None,
        sample_weights: bool | None = None,
        transform: Transform | None = None,
        prefetch: int = 1,
    ) -> Feed[Any]:
        """Batches as dicts of NumPy arrays, with the types that the dataset has.

        Args:
            batch_size: rows per batch on each rank. A step has np x batch_size rows over all ranks.
                Pass either this or ``global_batch``.
            columns: the parts of a batch: a dict of names to one column, of shape (batch_size,
                ...), or to a list of columns side by side, of shape (batch_size, columns). A list
                of names makes each column a part, and None all columns. Text and bytes are lists,
                as are ragged columns without ``pad_ragged``.
            global_batch: rows per step over all ranks, instead of ``batch_size``. Each rank has its
                part of them; parts differ by one row at most. Steps and their rows are then the
                same with any number of ranks, and a saved state can be resumed with another one.
                The feed's ``weight`` is the factor by which this rank's loss counts. A rank whose
                part is empty gets one row, and its weight is 0.
            shuffle: shuffle the rows, differently in each epoch.
            seed: seed of the shuffling; the same on all ranks.
            last_batch: "pad" fills the last batch with rows that were in the epoch before; the
                feed's ``real`` counts the other rows. "drop" leaves out the rows that do not fill a
                batch on every rank. "short" gives the last batch the rows that are left, so each
                row comes once; only with ``global_batch``. None is "short" with ``global_batch``,
                and "pad" with ``batch_size``.
            dtypes: NumPy types to convert numbers to, by part, or one type for all parts but
                images. None keeps the types.
            pad_ragged: for ragged columns, by part: a number that fills up short rows, to the
                longest of the batch; or (number, length), which also cuts long ones.
            images: for columns of images: what they become, by column.
            sample_weights: add a part "weight" at the end, of shape (batch_size,): 1.0 for each
                row, and 0.0 for padding. Keras takes it as sample weights. With ``global_batch``
                the weights of rows make up for unequal parts, too. None is False here.
            transform: called with each batch, in the thread that prepares it; what it returns
                replaces the batch.
            prefetch: how many chunks of batches, of about 3 MB each, are prepared ahead.

        Returns:
            A feed. Each iteration over it is the next epoch, also if it is made anew in each epoch.

        Raises:
            DataError: a column does not exist or cannot be converted, it has nulls, the disk has
                too little room, or ``global_batch`` is given and each rank has rows of its own.
            TypeError: an argument has the wrong type, or not exactly one of ``batch_size`` and
                ``global_batch`` is given.
            ValueError: an argument is out of range.
        """
        options = FeedOptions.of("numpy", locals())
        return Feed(self._plan(options), dicts_of(options.transform))

    @suggest_arguments(ALIASES)
    def to_torch(  # noqa: D417 - see batches
        self,
        batch_size: int | None = None,
        columns: Columns | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: Literal["pad", "drop", "short"] | None = None,
        dtypes: Dtypes | None = None,
        pad_ragged: PadRagged | None = None,
        images: Mapping[str, Image] | None = None,
        sample_weights: bool | None = None,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        prefetch: int = 1,
    ) -> Feed[Any]:
        """Batches as tuples of tensors if ``columns`` is a dict, otherwise as dicts of tensors.

        float64 becomes float32, and images have the shape (batch_size, channels, height, width).
        More on each argument stands at :meth:`batches`.

        Args:
            batch_size: rows per batch on each rank; or pass ``global_batch``.
            columns: a dict of each part's name to its column, or to a list of columns side by side.
                A list of names makes each column a part, and None all columns.
            global_batch: rows per step over all ranks, see :meth:`batches`. During a loop over the
                feed every ``backward()`` is weighted by the ``weight`` of its batch, so that a step
                of an optimizer that averages gradients equals that of one process.
            shuffle: shuffle the rows, differently in each epoch; ``seed`` is the same on all ranks.
            last_batch: "pad" fills the last batch with earlier rows, "drop" leaves it out, and
                "short" is for ``global_batch`` alone. None is "short" with it, otherwise "pad".
            sample_weights: see :meth:`batches`. True leaves ``backward()`` as it is: multiply the
                losses per row by the weights. Keras does.
            dtypes: NumPy types by part, or one for all parts but images. None: float64 becomes
                float32, other types stay.
            transform: called with each batch as a dict of NumPy arrays, which have these types and
                shapes already.
            device: where the tensors go. None: this rank's GPU if there is one, copied from pinned
                memory while the batch before is in use; otherwise the CPU. A batch is ready for the
                stream that is current when the loop takes it.
        """
        options = FeedOptions.of("torch", locals())
        from horovod_runner.data.feed import gradients, torch_feed

        weighted = options.global_batch is not None and not options.has_weights and place()[1] > 1
        kind = gradients.WeightedFeed if weighted else Feed
        return kind(self._plan(options), torch_feed.Make(options))

    @suggest_arguments(ALIASES, lambda: OF_LOADER)
    def to_torch_dataset(  # noqa: D417 - see batches
        self,
        columns: Columns | None = None,
        *,
        last_batch: Literal["pad", "drop", "short"] | None = None,
        dtypes: Dtypes | None = None,
        pad_ragged: PadRagged | None = None,
        images: Mapping[str, Image] | None = None,
        transform: Transform | None = None,
        whole: bool = False,
    ) -> torch.utils.data.Dataset[Any]:
        """This rank's rows, one by one, for a ``DataLoader``.

        Rank r of n has the rows r, r + n, r + 2n, ... in all epochs, and every rank has the same
        number. float64 becomes float32, and images have the shape (channels, height, width). The
        other arguments are those of :meth:`batches`, for rows instead of batches.

        Args:
            whole: give all rows to each rank, for what divides them among the ranks itself: the
                Trainer of Hugging Face, a DataLoader that Accelerate prepares, a
                ``DistributedSampler``.
            last_batch: "pad", or None, repeats rows so that every row is on some rank; "drop"
                leaves out the rows that are too many.
            dtypes: NumPy types by part, or one for all parts but images. None: float64 becomes
                float32, other types stay.
            transform: called with each row, in the DataLoader's workers if it has some.

        Raises:
            DataError: ``whole`` is given and each rank has only rows of its own; or as for
                :meth:`batches`.
            ValueError: ``whole`` and ``last_batch`` are both given; or as for :meth:`batches`.
        """
        options = FeedOptions.of("torch", locals())
        from horovod_runner.data.feed import torch_feed

        if whole:
            self._refuse_rows_of_ranks("whole=True gives all rows to each rank")
        packed = self._packed(options)
        rows = np.arange(self.rows) if whole else self._rows_for_good(options.how_last)
        return torch_feed.RowDataset(packed.store, packed.fields, rows, options)

    @suggest_arguments(ALIASES, lambda: OF_TF_DATASET)
    def to_tf(  # noqa: D417 - see batches
        self,
        batch_size: int | None = None,
        columns: Columns | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: Literal["pad", "drop", "short"] | None = None,
        dtypes: Dtypes | None = None,
        pad_ragged: PadRagged | None = None,
        images: Mapping[str, Image] | None = None,
        sample_weights: bool | None = None,
        start: int = 0,
    ) -> tf.data.Dataset:
        """Batches as a ``tf.data.Dataset``: of tuples if ``columns`` is a dict, otherwise of dicts.

        Each iteration is an epoch. float64 becomes float32, and images have the shape (batch_size,
        height, width, channels). More on each argument stands at :meth:`batches`.

        Args:
            batch_size: rows per batch on each rank; or pass ``global_batch``.
            columns: a dict of each part's name to its column, or to a list of columns side by side.
                A list of names makes each column a part, and None all columns.
            global_batch: rows per step over all ranks, see :meth:`batches`. All batches have the
                same shape: repeated rows fill up parts that have fewer, with the weight 0.
            shuffle: shuffle the rows, differently in each epoch; ``seed`` is the same on all ranks.
            last_batch: "pad" fills the last batch with earlier rows, "drop" leaves it out, and
                "short" is for ``global_batch`` alone. None is "short" with it, otherwise "pad".
            sample_weights: see :meth:`batches`. None is True with ``global_batch``: ``model.fit``
                is exact with them, and without them it is not.
            dtypes: NumPy types by part, or one for all parts but images. None: float64 becomes
                float32, other types stay.
            start: number of batches to skip, counted over all epochs: the first iteration begins
                after them.
        """
        options = FeedOptions.of("tensorflow", locals())
        from horovod_runner.data.feed import tf_feed

        return tf_feed.dataset_of(self._plan(options))
