"""TensorFlow: batches as a tf.data.Dataset.

    Feed --chunks of many batches--> Dataset.from_generator --slices--> batches

TensorFlow takes a chunk without a copy if its memory is aligned like that of
:class:`~horovod_runner.data.pack.buffers.Buffers` (``NumpyTensorBuffer`` in its py_func.cc), and
releases it once no batch of it is in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_runner.data.feed.feed import Feed, Plan
from horovod_runner.data.feed.fields import Field
from horovod_runner.data.feed.rows_once import RowsOnce
from horovod_runner.worker.profiling.clock import clock

_FEED = "_horovod_runner_feed"


def dataset_of(plan: Plan) -> tf.data.Dataset:
    """Make a dataset of batches, all of the same shape, of which each iteration is an epoch."""
    feed: Feed[Any] = Feed(plan, _as_chunk if _is_uniform(plan) else _as_batches)
    feed.skip(plan.options.start)
    dataset = _dataset(feed, plan, feed.batch_rows(0))
    # TensorFlow takes the number of batches from the first iteration: it must be a whole epoch.
    if not plan.options.start % max(1, len(feed)):
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(feed)))
    setattr(dataset, _FEED, feed)
    return dataset


def _is_uniform(plan: Plan) -> bool:
    """Whether all batches with the same number of rows have the same shape."""
    return all(field.is_uniform for field in plan.fields)


def _dataset(feed: Feed[Any], plan: Plan, rows: int | None) -> tf.data.Dataset:
    """The batches of a feed, each of so many rows; None if they differ."""
    signatures = [_signature(field, rows) for field in plan.fields]
    if plan.options.has_weights:
        signatures.append(tf.TensorSpec([rows], tf.float32))
    dataset = (_in_chunks if _is_uniform(plan) else _one_by_one)(feed, signatures)
    if plan.options.as_tuple:
        return dataset
    return dataset.map(lambda *values: dict(zip(feed.names, values, strict=True)))


def feed_of(dataset: object) -> Feed[Any] | None:
    """The feed behind a dataset of :func:`dataset_of`; None for any other object."""
    feed: Feed[Any] | None = getattr(dataset, _FEED, None)
    return feed


def feed_behind(dataset: object) -> Feed[Any] | None:
    """The feed behind a dataset, or behind the one that it was made of; None for other data."""
    while dataset is not None:
        if (feed := feed_of(dataset)) is not None:
            return feed
        # TensorFlow has no public name for it.
        dataset = getattr(dataset, "_input_dataset", None)
    return None


def rows_once(dataset: object) -> tuple[tf.data.Dataset, RowsOnce[Any]] | None:
    """The rows of a rank behind a dataset, each once and without padding.

    The dataset is one of :func:`dataset_of`, or what ``map`` and ``prefetch`` have made of it.

    Returns:
        A dataset with the same parts, whose batches may differ in their rows, and its feed. None
        for another dataset, or if a function of ``map`` requires batches of one size.
    """
    feed = feed_of(dataset)
    if feed is not None:
        once = RowsOnce(feed)
        made = _dataset(once, once.plan, None)
        return made.apply(tf.data.experimental.assert_cardinality(len(once))), once
    source = getattr(dataset, "_input_dataset", None)
    found = None if source is None else rows_once(source)
    kind = type(dataset).__name__
    if found is None or kind == "_PrefetchDataset":
        return found
    function = getattr(getattr(dataset, "_map_func", None), "_func", None)
    if kind not in ("_MapDataset", "_ParallelMapDataset") or function is None:
        return None
    try:
        return found[0].map(function), found[1]
    except Exception:  # whatever the user's function raises
        return None


def _as_chunk(_: list[str], values: list[Any]) -> list[Any]:
    return values


def _as_batches(_: list[str], values: list[Any]) -> list[Any]:
    return list(zip(*values, strict=True))


def _in_chunks(feed: Feed[Any], signatures: Sequence[tf.TensorSpec]) -> tf.data.Dataset:
    chunks = tf.data.Dataset.from_generator(
        lambda: _measured(feed.chunks()),
        output_signature=tuple(tf.TensorSpec([None, *s.shape], s.dtype) for s in signatures),
    ).prefetch(1)
    # The slices share the chunk's memory, where they are aligned.
    return chunks.flat_map(lambda *parts: tf.data.Dataset.from_tensor_slices(parts))


def _measured(chunks: Iterator[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Pass chunks on, and count for the profile of the run what TensorFlow takes."""
    for chunk in chunks:
        clock.batches += len(chunk[0])
        clock.cells += math.prod(np.shape(chunk[0]))
        with clock.stage("idle"):
            yield tuple(chunk)


def _one_by_one(feed: Feed[Any], signatures: Sequence[Any]) -> tf.data.Dataset:
    """With ragged columns, whose shapes differ from batch to batch."""

    def batches() -> Iterator[tuple[Any, ...]]:
        for batch in feed:
            yield tuple(
                _ragged(part, signature) if isinstance(signature, tf.RaggedTensorSpec) else part
                for part, signature in zip(batch, signatures, strict=True)
            )

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tuple(signatures))
    return dataset.prefetch(tf.data.AUTOTUNE)


def _signature(field: Field, batch_rows: int | None) -> Any:
    """Type and shape of a part of a batch."""
    kind = field.columns[0].kind if field.single and field.image is None else "number"
    if kind in ("text", "bytes"):
        return tf.TensorSpec([batch_rows], tf.string)
    levels = len(field.columns[0].shape)
    if kind == "object" and field.pad is None:
        dtype = tf.string if field.columns[0].is_ragged_text else field.result_dtype
        return tf.RaggedTensorSpec([batch_rows] + [None] * levels, dtype, ragged_rank=levels)
    dtype = field.result_dtype
    if kind == "list" and field.pad is None:
        return tf.RaggedTensorSpec([batch_rows, None], dtype, row_splits_dtype=tf.int64)
    return tf.TensorSpec([batch_rows, *field.row_shape], dtype)


def _ragged(rows: Sequence[Any], signature: tf.RaggedTensorSpec) -> tf.RaggedTensor:
    if isinstance(rows[0], list):  # lists of lists, or of text
        return tf.ragged.constant(rows, signature.dtype, signature.ragged_rank)
    lengths = [len(row) for row in rows]
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), lengths)
