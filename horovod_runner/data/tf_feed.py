"""Batches as a tf.data.Dataset: TensorFlow gathers by itself, from the mapped matrices.

    Order --row numbers, many steps at a time--> tf.gather over DLPack tensors --> batches

Only text, bytes and ragged columns take the way through Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_runner.data.columns import Array
from horovod_runner.data.feed import Feed
from horovod_runner.data.fields import Field
from horovod_runner.data.store import Store

_ALIGNMENT = 64  # TensorFlow ends the process on a tensor that is aligned to less


def gathered(
    feed: Feed[Any], store: Store, fields: Sequence[Field], batch_rows: int
) -> tf.data.Dataset:
    """A dataset of tuples of tensors, in the fields' order, gathered by TensorFlow.

    Args:
        feed: says which rows, epoch by epoch.
        store: where they are.
        fields: all uniform.
        batch_rows: of this rank.
    """
    names = {column.name for field in fields for column in field.columns}
    groups = [group for group in store.layout.groups() if names & {c.name for c in group}]
    tensors = [_tensor(store.matrix(group)) for group in groups]
    signature = [tf.TensorSpec([None], tf.int64)]
    if feed.has_weights:
        signature.append(tf.TensorSpec([None, batch_rows], tf.float32))
    rows = tf.data.Dataset.from_generator(
        lambda: _numbers(feed),
        output_signature=tuple(signature),
    )

    def batches(numbers: tf.Tensor, *weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        taken = {}
        for group, tensor in zip(groups, tensors, strict=True):
            matrix = tf.gather(tensor, numbers)
            at = 0
            for column in group:
                taken[column.name] = (matrix, at)
                at += column.width
        return (*(_field(field, taken, batch_rows) for field in fields), *weights)

    return rows.map(batches, num_parallel_calls=1).unbatch()


def _numbers(feed: Feed[Any]) -> Iterator[tuple[Array, ...]]:
    for step, rows in feed.row_numbers():
        yield (rows.ravel(), feed.weights(step, rows)) if feed.has_weights else (rows.ravel(),)


def _field(field: Field, taken: Mapping[str, tuple[tf.Tensor, int]], batch_rows: int) -> tf.Tensor:
    parts: list[list[Any]] = []
    for column in field.columns:
        matrix, at = taken[column.name]
        if parts and parts[-1][0] is matrix and parts[-1][2] == at:
            parts[-1][2] = at + column.width  # neighbours: one slice for both
        else:
            parts.append([matrix, at, at + column.width])
    slices = [
        matrix if (a, b) == (0, matrix.shape[1]) else matrix[:, a:b] for matrix, a, b in parts
    ]
    if field.dtype:
        slices = [tf.cast(one, field.dtype) for one in slices]
    elif len(slices) > 1:
        common = np.result_type(*(column.dtype for column in field.columns))
        slices = [tf.cast(one, common) for one in slices]
    whole = slices[0] if len(slices) == 1 else tf.concat(slices, axis=1)
    if field.single:
        return tf.reshape(whole, [-1, batch_rows, *field.columns[0].shape])
    return tf.reshape(whole, [-1, batch_rows, whole.shape[1]])


def _tensor(matrix: Array) -> tf.Tensor:
    if matrix.ctypes.data % _ALIGNMENT or not matrix.size:
        return tf.constant(matrix)
    if matrix.dtype == np.bool_:
        return tf.constant(matrix)
    return tf.experimental.dlpack.from_dlpack(matrix.__dlpack__())


def through_python(
    feed: Feed[tuple[Any, ...]], fields: Sequence[Field], batch_rows: int
) -> tf.data.Dataset:
    """A dataset of what a feed of tuples gives, by the way of Python."""

    def batches() -> Iterator[tuple[Any, ...]]:
        for batch in feed:
            yield tuple(
                _ragged(v) if s is _RAGGED else v for v, s in zip(batch, kinds, strict=True)
            )

    kinds = [_kind(field) for field in fields]
    signature = tuple(
        _signature(field, kind, batch_rows) for field, kind in zip(fields, kinds, strict=True)
    )
    if feed.has_weights:
        kinds.append(_NUMBERS)
        signature = (*signature, tf.TensorSpec([batch_rows], tf.float32))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def finished(
    dataset: tf.data.Dataset, names: Sequence[str] | None, steps: int | None
) -> tf.data.Dataset:
    """As the user gets it: named where asked for, with its length, made ahead."""
    if names is not None:
        dataset = dataset.map(lambda *values: dict(zip(names, values, strict=True)))
    if steps is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return dataset.prefetch(tf.data.AUTOTUNE)


_STRINGS, _RAGGED, _NUMBERS = "strings", "ragged", "numbers"


def _kind(field: Field) -> str:
    if field.image is not None:
        return _NUMBERS
    kind = field.columns[0].kind
    if field.single and kind in ("text", "bytes"):
        return _STRINGS
    return _RAGGED if field.single and kind == "list" and field.pad is None else _NUMBERS


def _signature(field: Field, kind: str, batch_rows: int) -> Any:
    if kind is _STRINGS:
        return tf.TensorSpec([batch_rows], tf.string)
    column = field.columns[0]
    if field.image is not None:
        return tf.TensorSpec([batch_rows, *field.image.shape], field.dtype or "uint8")
    dtype = field.dtype or np.result_type(*(c.dtype for c in field.columns)).name
    if kind is _RAGGED:
        return tf.RaggedTensorSpec([batch_rows, None], dtype, row_splits_dtype=tf.int64)
    if not field.single:
        return tf.TensorSpec([batch_rows, sum(c.width for c in field.columns)], dtype)
    shape = column.shape if column.is_fixed else (field.length,)
    return tf.TensorSpec([batch_rows, *shape], dtype)


def _ragged(rows: Sequence[Array]) -> tf.RaggedTensor:
    lengths = [len(row) for row in rows]
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), lengths)
