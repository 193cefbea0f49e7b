"""Batches as a tf.data.Dataset.

    Feed --chunks of many batches--> Dataset.from_generator --cut up--> batches

TensorFlow takes a chunk as it is, without a copy, where its memory is aligned as that of
:class:`~horovod_runner.data.store.Buffers` is (``NumpyTensorBuffer`` in its py_func.cc), and gives
it back once no batch of it is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_runner.data.columns import Array
from horovod_runner.data.feed import Feed, Plan
from horovod_runner.data.fields import Field

# Larger ones are cut out of their chunk without a copy, which takes longer for small ones.
_SMALL_BYTES = 1 << 16


def dataset_of(plan: Plan, batch_rows: int, as_tuple: bool, start: int) -> tf.data.Dataset:
    """The dataset, each iteration of which is an epoch.

    Args:
        plan: of the feed.
        batch_rows: of this rank.
        as_tuple: batches are tuples, else dicts.
        start: how many batches come before the first one, of all epochs together.
    """
    is_uniform = all(field.is_uniform for field in plan.fields)
    feed: Feed[Any] = Feed(plan, _whole if is_uniform else _apart, is_helped=True)
    feed.skip(start)
    signatures = [_signature(field, batch_rows) for field in plan.fields]
    if plan.weights:
        signatures.append(tf.TensorSpec([batch_rows], tf.float32))
    dataset = (_in_chunks if is_uniform else _one_by_one)(feed, signatures)
    if not as_tuple:
        dataset = dataset.map(lambda *values: dict(zip(feed.names, values, strict=True)))
    if not start % max(1, len(feed)):
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(feed)))
    return dataset


def _whole(_: list[str], values: list[Any]) -> list[Any]:
    return values


def _apart(_: list[str], values: list[Any]) -> list[Any]:
    return list(zip(*values, strict=True))


def _in_chunks(feed: Feed[Any], signatures: Sequence[tf.TensorSpec]) -> tf.data.Dataset:
    chunks = tf.data.Dataset.from_generator(
        lambda: map(tuple, feed.chunks()),
        output_signature=tuple(tf.TensorSpec([None, *s.shape], s.dtype) for s in signatures),
    ).prefetch(1)
    if sum(s.shape.num_elements() * s.dtype.size for s in signatures) <= _SMALL_BYTES:
        return chunks.unbatch()

    def batches(*parts: tf.Tensor) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(tf.shape(parts[0], out_type=tf.int64)[0])
        return numbers.map(lambda number: tuple(part[number] for part in parts))

    return chunks.flat_map(batches)


def _one_by_one(feed: Feed[Any], signatures: Sequence[Any]) -> tf.data.Dataset:
    """With ragged columns, whose batches have a shape each."""

    def batches() -> Iterator[tuple[Any, ...]]:
        for batch in feed:
            yield tuple(
                _ragged(part) if isinstance(signature, tf.RaggedTensorSpec) else part
                for part, signature in zip(batch, signatures, strict=True)
            )

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tuple(signatures))
    return dataset.prefetch(tf.data.AUTOTUNE)


def _signature(field: Field, batch_rows: int) -> Any:
    """Of a batch's part."""
    if field.image is not None:
        return tf.TensorSpec([batch_rows, *field.image.shape], field.dtype or "uint8")
    column = field.columns[0]
    if field.single and column.kind in ("text", "bytes"):
        return tf.TensorSpec([batch_rows], tf.string)
    dtype = field.dtype or np.result_type(*(c.dtype for c in field.columns)).name
    if field.single and column.kind == "list" and field.pad is None:
        return tf.RaggedTensorSpec([batch_rows, None], dtype, row_splits_dtype=tf.int64)
    if not field.single:
        return tf.TensorSpec([batch_rows, sum(c.width for c in field.columns)], dtype)
    shape = column.shape if column.is_fixed else (field.length,)
    return tf.TensorSpec([batch_rows, *shape], dtype)


def _ragged(rows: Sequence[Array]) -> tf.RaggedTensor:
    lengths = [len(row) for row in rows]
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), lengths)
