"""What Keras needs of Horovod on its TensorFlow backend; torch_collectives has the same names.

All collectives have a name of their own: Keras names its tensors as it goes, on each rank for
itself, and Horovod pairs by name. TensorFlow has names in a graph alone, so all of them are called
in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from horovod_runner.keras.reduction import BFloat16, Reduction

# What Horovod can send, for what it cannot: the bits alone count.
_SENT_AS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def reduce_gradients(gradients: Sequence[Any], name: str, how: Reduction) -> list[Any]:
    """The gradients of all ranks, reduced; dense ones and IndexedSlices."""
    if tf.executing_eagerly():
        return list(_reducer(name, how)(list(gradients)))
    return _reduce(gradients, name, how)


def all_finite(finite: Any, name: str) -> Any:
    """Whether a flag is true on all ranks."""
    return _allreduce(tf.cast(finite, tf.float32), f"{name}.finite", op=hvd.Min) > 0.5


def scale(values: Sequence[Any], factor: float) -> list[Any]:
    """Tensors multiplied by a number; IndexedSlices among them."""
    return [
        tf.IndexedSlices(v.values * factor, v.indices, v.dense_shape)
        if isinstance(v, tf.IndexedSlices)
        else v * factor
        for v in values
    ]


def scale_variables(variables: Sequence[Any], factor: float) -> None:
    """Multiply variables by a number, in one call whatever their number is."""
    _scaler(tuple(v.value.ref() for v in variables))(tf.constant(factor, tf.float64))


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Give Keras's or TensorFlow's variables the values that they have on one rank."""
    own = [v.value if not callable(getattr(v, "value", None)) else v for v in variables]

    def broadcast() -> None:
        for index, variable in enumerate(own):
            sent = _sendable(tf.convert_to_tensor(variable))
            name = f"horovod_runner.broadcast.{index}"
            got = hvd.broadcast(sent, root_rank, name=name, ignore_name_scope=True)
            variable.assign(
                got if sent.dtype == variable.dtype else tf.bitcast(got, variable.dtype)
            )

    if own:
        tf.function(broadcast, autograph=False)()


def average(numbers: Sequence[float], name: str) -> list[float]:
    """Numbers averaged over the ranks."""
    with tf.device("/cpu:0"):
        own = tf.constant(numbers, tf.float64)
        return [float(each) for each in _average(name)(own).numpy()]


def gather(numbers: Sequence[int], name: str) -> list[list[int]]:
    """Every rank's numbers."""
    with tf.device("/cpu:0"):
        got = _gather(name)(tf.constant([numbers], tf.int64))
        return [[int(each) for each in row] for row in got.numpy()]


def can_join() -> bool:
    """Whether this Horovod's join waits: as released, TensorFlow takes it for a constant."""
    definition = op_def_registry.get("HorovodJoin")
    return definition is not None and bool(definition.is_stateful)


def join() -> None:
    """Wait until all ranks are here, and take part in their reductions with zeros meanwhile."""
    hvd.join()


def as_tensor(value: Any) -> Any:
    """What Horovod reduces of a value."""
    return tf.convert_to_tensor(value)


@cache
def _reducer(name: str, how: Reduction) -> Any:
    return tf.function(lambda gradients: _reduce(gradients, name, how), autograph=False)


@cache
def _average(name: str) -> Any:
    return tf.function(lambda own: _allreduce(own, name, op=hvd.Average), autograph=False)


@cache
def _gather(name: str) -> Any:
    return tf.function(lambda own: _allgather(own, name), autograph=False)


@cache
def _scaler(variables: tuple[Any, ...]) -> Any:
    def scale(factor: Any) -> None:
        for reference in variables:
            variable = reference.deref()
            variable.assign(variable * tf.cast(factor, variable.dtype))

    return tf.function(scale, autograph=False)


def _reduce(gradients: Sequence[Any], name: str, how: Reduction) -> list[Any]:
    reduced = list(gradients)
    dense = []
    for index, gradient in enumerate(gradients):
        if not isinstance(gradient, tf.IndexedSlices):
            dense.append(index)
        elif how.sparse_as_dense:
            reduced[index] = tf.convert_to_tensor(gradient)
            dense.append(index)
        else:
            with tf.device(how.device_sparse):
                reduced[index] = _reduce_sparse(gradient, f"{name}.{index}", how)
    with tf.device(how.device_dense):
        own = [reduced[index] for index in dense]
        for index, tensor in zip(dense, _reduce_dense(own, dense, name, how), strict=True):
            reduced[index] = tensor
    return reduced


def _reduce_dense(own: list[Any], indices: list[int], name: str, how: Reduction) -> list[Any]:
    if not own:
        return []
    types = [tensor.dtype for tensor in own]
    if how.compression is BFloat16:
        reduced = _reduce_bfloat16(own, name, how)
    else:
        # Horovod adds up no bfloat16.
        wide = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in own]
        packed = [how.compression.compress(tensor) for tensor in wide]
        sent = _reduce_all([tensor for tensor, _ in packed], indices, name, how)
        pairs = zip(sent, packed, strict=True)
        reduced = [how.compression.decompress(tensor, context) for tensor, (_, context) in pairs]
    return [tf.cast(tensor, dtype) for tensor, dtype in zip(reduced, types, strict=True)]


def _reduce_all(tensors: list[Any], indices: list[int], name: str, how: Reduction) -> list[Any]:
    options = how.options(hvd)
    if not how.groups:
        pairs = zip(tensors, indices, strict=True)
        return [_allreduce(tensor, f"{name}.{index}", **options) for tensor, index in pairs]
    reduced: list[Any] = []
    for number, group in enumerate(how.grouped(tensors)):
        group_name = f"{name}.group.{number}"
        reduced += hvd.grouped_allreduce(group, name=group_name, ignore_name_scope=True, **options)
    return reduced


def _reduce_sparse(gradient: Any, name: str, how: Reduction) -> Any:
    values = gradient.values
    if how.compression is BFloat16:
        sent, context = tf.cast(values, tf.bfloat16), values.dtype
        got = tf.cast(_allgather(sent, f"{name}.values"), context)
    else:
        sent, context = how.compression.compress(values)
        got = how.compression.decompress(_allgather(sent, f"{name}.values"), context)
    if how.op == hvd.Average:
        got /= hvd.size()
    indices = _allgather(gradient.indices, f"{name}.indices")
    return tf.IndexedSlices(got, indices, gradient.dense_shape)


def _reduce_bfloat16(tensors: list[Any], name: str, how: Reduction) -> list[Any]:
    size = hvd.size()
    flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], 0)
    part = -(-tf.size(flat) // size)
    padded = tf.pad(flat, [[0, part * size - tf.size(flat)]])
    sent = tf.bitcast(tf.cast(padded, tf.bfloat16), tf.float16)
    got, _ = hvd.alltoall(
        sent, splits=tf.fill([size], part), name=f"{name}.parts", ignore_name_scope=True
    )
    own = tf.cast(tf.bitcast(tf.reshape(got, [size, part]), tf.bfloat16), tf.float32)
    total = tf.reduce_sum(own, 0)
    if how.op == hvd.Average:
        total /= size
    whole = tf.cast(_allgather(tf.cast(total, tf.bfloat16), f"{name}.sums"), tf.float32)
    sizes = [tf.size(tensor) for tensor in tensors]
    parts = tf.split(whole[: tf.size(flat)], sizes)
    return [tf.reshape(p, tf.shape(t)) for p, t in zip(parts, tensors, strict=True)]


def _allreduce(tensor: Any, name: str, **options: Any) -> Any:
    return hvd.allreduce(tensor, name=name, ignore_name_scope=True, **options)


def _allgather(tensor: Any, name: str) -> Any:
    sent = _sendable(tensor)
    got = hvd.allgather(sent, name=name, ignore_name_scope=True)
    return got if sent.dtype == tensor.dtype else tf.bitcast(got, tensor.dtype)


def _sendable(tensor: Any) -> Any:
    sent_as = _SENT_AS.get(tensor.dtype)
    return tensor if sent_as is None else tf.bitcast(tensor, sent_as)
