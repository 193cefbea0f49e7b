"""Horovod's collectives for Keras on TensorFlow, with the names of torch_collectives.

Horovod pairs operations of the ranks by name, but the names that Keras gives to tensors may differ
between ranks. All collectives here therefore have explicit names. TensorFlow has names only in a
graph, so all collectives run in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from horovod_runner.integrations.keras import reduction
from horovod_runner.integrations.keras.reduction import Completed, Groups, Reduction, SentAsBFloat16

# Types that Horovod cannot send, and types of the same size that carry their bits.
_SENT_AS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def reduce_gradients(
    gradients: Sequence[Any], name: str, how: Reduction, groups: Groups = None, alike: Any = None
) -> list[Any]:
    """Reduce gradients over the ranks: dense tensors and IndexedSlices.

    ``groups`` has the positions of the gradients of each group; None reduces each separately. Where
    ``alike`` of :class:`Completed` is false, IndexedSlices are sent as dense tensors.
    """
    if tf.executing_eagerly():
        return list(_in_graph(_reduce, name, how, groups)(list(gradients), alike))
    return _reduce(gradients, alike, name, how, groups)


def all_finite(finite: Any, name: str, how: Reduction) -> Any:
    """Return whether a flag is true on all ranks that reduce."""
    flag = tf.cast(finite, tf.float32)
    return _allreduce(flag, f"{name}.finite", op=hvd.Min, **how.where()) > 0.5


def complete(
    gradients: Sequence[Any], variables: Sequence[Any], name: str, how: Reduction
) -> Completed:
    """Fill in zeros for the gradients that this rank lacks, and are None: others may have them.

    They are IndexedSlices where others have such; in a graph, which cannot know, for embeddings.
    """
    is_eager = tf.executing_eagerly()
    there = [gradient is not None for gradient in gradients]
    sparse = [
        isinstance(gradient, tf.IndexedSlices)
        or (gradient is None and not is_eager and _is_embedding(variable))
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    flags = tf.constant([there, sparse], tf.int32) + _zero()
    if is_eager:
        counts, slices = _in_graph(_count, name, how)(flags)
        alike = tf.reduce_all((slices == 0) | (slices == counts))
        sparse = [count > 0 for count in slices.numpy()]
    else:
        counts, slices = _count(flags, name, how)
        # TensorFlow removes a reduction from a graph where its result has no use, on this rank
        # alone, unless a variable gets it.
        _variable("count").assign(counts[0])
        alike = tf.reduce_all((slices == 0) | (slices == how.size(hvd)))
    return Completed(list(map(_filled, gradients, variables, sparse)), lambda: counts, alike)


def _is_embedding(variable: Any) -> bool:
    return str(getattr(variable, "path", variable.name)).partition(":")[0].endswith("embeddings")


def _filled(gradient: Any, variable: Any, is_sparse: bool) -> Any:
    """A gradient, or zeros that can be reduced: as many as there are values, or without a row."""
    if gradient is not None:
        return gradient
    (unwrapped,) = _unwrapped([variable])
    zero = tf.cast(_zero(), unwrapped.dtype)
    if not is_sparse:
        return tf.fill(unwrapped.shape, zero)
    values = tf.fill([_zero(), *unwrapped.shape[1:]], zero)
    indices = tf.fill([_zero()], tf.cast(_zero(), tf.int64))
    return tf.IndexedSlices(values, indices, tf.constant(unwrapped.shape.as_list(), tf.int64))


def _zero() -> Any:
    # Not a constant: TensorFlow would reduce constants while it makes the graph, each rank its own.
    return _variable("zero").read_value()


@cache
def _variable(name: str) -> Any:
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int32, name=f"horovod_runner_{name}")


def _count(flags: Any, name: str, how: Reduction) -> Any:
    return tf.unstack(_allreduce(flags, f"{name}.there", op=hvd.Sum, **how.where()))


def differentiate(loss: Any, variables: Sequence[Any], tape: Any = None) -> list[Any]:
    """Return the gradients of a loss; see :meth:`Distributed.compute_gradients`."""
    if tape is None and not callable(loss):
        raise ValueError("compute_gradients of a tensor needs its tape: pass tape=, or a function")
    recorder = tf.GradientTape() if tape is None else tape
    if callable(loss):
        with recorder:
            loss = loss()
    return list(recorder.gradient(loss, _unwrapped(variables)))


def graph() -> Any:
    """Return the graph that is built at present; "eager" outside of one."""
    return "eager" if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def scale(values: Sequence[Any], factor: float) -> list[Any]:
    """Multiply tensors and IndexedSlices by a number."""
    return [
        tf.IndexedSlices(v.values * factor, v.indices, v.dense_shape)
        if isinstance(v, tf.IndexedSlices)
        else v * factor
        for v in values
    ]


def scale_variables(variables: Sequence[Any], factor: float) -> None:
    """Multiply variables by a number, in one call of a graph."""
    _scaler(tuple(v.value.ref() for v in variables))(tf.constant(factor, tf.float64))


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = hvd.global_process_set
) -> None:
    """Set Keras's or TensorFlow's variables to one rank's values."""
    unwrapped = _unwrapped(variables)

    def broadcast() -> None:
        for index, variable in enumerate(unwrapped):
            sent = _sendable(tf.convert_to_tensor(variable))
            name = f"horovod_runner.broadcast.{index}"
            received = hvd.broadcast(
                sent, root_rank, name=name, ignore_name_scope=True, process_set=process_set
            )
            variable.assign(
                received if sent.dtype == variable.dtype else tf.bitcast(received, variable.dtype)
            )

    if unwrapped:
        tf.function(broadcast, autograph=False)()


def average(numbers: Sequence[float], name: str) -> list[float]:
    """Average numbers over the ranks."""
    with tf.device("/cpu:0"):
        tensor = tf.constant(numbers, tf.float64)
        averaged = _in_graph(_allreduce, name)(tensor)
        return [float(number) for number in averaged.numpy()]


def average_with_gradient(tensor: Any, name: str) -> Any:
    """Average a tensor over the ranks, as a differentiable operation."""
    if tf.executing_eagerly():
        return _in_graph(_average_with_gradient, name)(tensor)
    # A layer may be called twice in one step.
    return _average_with_gradient(tensor, tf.compat.v1.get_default_graph().unique_name(name))


def gather(numbers: Sequence[int], name: str) -> list[list[int]]:
    """Return the numbers of all ranks, in the order of ranks."""
    with tf.device("/cpu:0"):
        rows = _in_graph(_allgather, name)(tf.constant([numbers], tf.int64))
        return [[int(number) for number in row] for row in rows.numpy()]


def can_join() -> bool:
    """Return whether ``join`` waits; in released Horovods TensorFlow treats it as a constant."""
    definition = op_def_registry.get("HorovodJoin")
    return definition is not None and bool(definition.is_stateful)


def join() -> None:
    """Wait for all ranks; meanwhile contribute zeros to their reductions."""
    hvd.join()


def as_tensor(value: Any) -> Any:
    """Convert a value to a tensor."""
    return tf.convert_to_tensor(value)


@cache
def _in_graph(function: Callable[..., Any], *settings: Any) -> Any:
    """A function as a graph; it gets the tensors of a call, and then the settings."""
    return tf.function(lambda *tensors: function(*tensors, *settings), autograph=False)


@cache
def _scaler(variables: tuple[Any, ...]) -> Any:
    def scale(factor: Any) -> None:
        for reference in variables:
            variable = reference.deref()
            variable.assign(variable * tf.cast(factor, variable.dtype))

    return tf.function(scale, autograph=False)


def _unwrapped(variables: Sequence[Any]) -> list[Any]:
    """Return TensorFlow's variables; a Keras variable holds one."""
    return [v.value if not callable(getattr(v, "value", None)) else v for v in variables]


def _reduce(
    gradients: Sequence[Any], same: Any, name: str, how: Reduction, groups: Groups
) -> list[Any]:
    sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]

    def reduce_unchanged() -> list[Any]:
        return _reduce_as_they_are(gradients, name, how, groups)

    if same is None or how.sparse_as_dense or not any(sparse):
        return reduce_unchanged()

    def reduce_dense() -> list[Any]:
        reduced = _reduce_as_they_are(gradients, name, replace(how, sparse_as_dense=True), groups)
        return [
            _slices_of_all(tensor, gradient) if was_sparse else tensor
            for tensor, gradient, was_sparse in zip(reduced, gradients, sparse, strict=True)
        ]

    return list(tf.cond(same, reduce_unchanged, reduce_dense))


def _slices_of_all(tensor: Any, like: Any) -> Any:
    """A tensor as IndexedSlices of all its rows."""
    indices = tf.range(tf.shape(tensor, like.indices.dtype)[0], dtype=like.indices.dtype)
    return tf.IndexedSlices(tensor, indices, like.dense_shape)


def _reduce_as_they_are(
    gradients: Sequence[Any], name: str, how: Reduction, groups: Groups
) -> list[Any]:
    reduced = list(gradients)
    dense = []
    for index, gradient in enumerate(gradients):
        if how.sparse_as_dense or not isinstance(gradient, tf.IndexedSlices):
            dense.append(index)
        else:
            with tf.device(how.device_sparse):
                reduced[index] = _reduce_sparse(gradient, f"{name}.{index}", how)
    tensors = [tf.convert_to_tensor(gradients[index]) for index in dense]
    with tf.device(how.device_dense):
        sums = _reduce_dense(tensors, dense, name, how, groups)
        for index, tensor in zip(dense, sums, strict=True):
            reduced[index] = tensor
    return reduced


def _reduce_dense(
    tensors: list[Any], indices: list[int], name: str, how: Reduction, groups: Groups
) -> list[Any]:
    if not tensors:
        return []
    types = [tensor.dtype for tensor in tensors]
    if how.compression is SentAsBFloat16:
        reduced = _reduce_bfloat16(tensors, name, how)
    else:
        # Horovod cannot sum bfloat16.
        wide = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        packed = [how.compression.compress(tensor) for tensor in wide]
        by_index = dict(zip(indices, (tensor for tensor, _ in packed), strict=True))
        sent = _reduce_all(by_index, name, how, groups)
        pairs = zip(sent, packed, strict=True)
        reduced = [how.compression.decompress(tensor, context) for tensor, (_, context) in pairs]
    return [tf.cast(tensor, dtype) for tensor, dtype in zip(reduced, types, strict=True)]


def _reduce_all(tensors: dict[int, Any], name: str, how: Reduction, groups: Groups) -> list[Any]:
    options = how.options(hvd)
    if groups is None:
        return [_allreduce(t, f"{name}.{index}", **options) for index, t in tensors.items()]
    reduced: dict[int, Any] = {}
    types = {index: tensor.dtype for index, tensor in tensors.items()}
    for number, group in enumerate(reduction.by_type(groups, types)):
        group_name = f"{name}.group.{number}"
        results = hvd.grouped_allreduce(
            [tensors[index] for index in group], name=group_name, ignore_name_scope=True, **options
        )
        reduced.update(zip(group, results, strict=True))
    return [reduced[index] for index in tensors]


def _reduce_sparse(gradient: Any, name: str, how: Reduction) -> Any:
    values = gradient.values
    if how.compression is SentAsBFloat16:
        sent, context = tf.cast(values, tf.bfloat16), values.dtype
        gathered = tf.cast(_allgather(sent, f"{name}.values", how), context)
    else:
        sent, context = how.compression.compress(values)
        gathered = how.compression.decompress(_allgather(sent, f"{name}.values", how), context)
    if how.op == hvd.Average:
        gathered /= how.size(hvd)
    # A rank without a row does not know the type of the others' indices.
    indices = _allgather(tf.cast(gradient.indices, tf.int64), f"{name}.indices", how)
    indices = tf.cast(indices, gradient.indices.dtype)
    return tf.IndexedSlices(gathered, indices, gradient.dense_shape)


def _reduce_bfloat16(tensors: list[Any], name: str, how: Reduction) -> list[Any]:
    size = how.size(hvd)
    flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], 0)
    part = -(-tf.size(flat) // size)
    padded = tf.pad(flat, [[0, part * size - tf.size(flat)]])
    sent = tf.bitcast(tf.cast(padded, tf.bfloat16), tf.float16)
    received, _ = hvd.alltoall(
        sent,
        splits=tf.fill([size], part),
        name=f"{name}.parts",
        ignore_name_scope=True,
        **how.where(),
    )
    rows = tf.cast(tf.bitcast(tf.reshape(received, [size, part]), tf.bfloat16), tf.float32)
    total = tf.reduce_sum(rows, 0)
    if how.op == hvd.Average:
        total /= size
    whole = tf.cast(_allgather(tf.cast(total, tf.bfloat16), f"{name}.sums", how), tf.float32)
    sizes = [tf.size(tensor) for tensor in tensors]
    parts = tf.split(whole[: tf.size(flat)], sizes)
    return [tf.reshape(p, tf.shape(t)) for p, t in zip(parts, tensors, strict=True)]


def _allreduce(tensor: Any, name: str, op: Any = hvd.Average, **options: Any) -> Any:
    return hvd.allreduce(tensor, name=name, op=op, ignore_name_scope=True, **options)


def _average_with_gradient(tensor: Any, name: str) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def average(value: Any) -> Any:
        # Horovod's own gradient has a name that may differ between ranks.
        def gradient(upstream: Any) -> Any:
            return _allreduce(upstream, f"{name}.gradient")

        return _allreduce(value, name), gradient

    return average(tensor)


def _allgather(tensor: Any, name: str, how: Reduction | None = None) -> Any:
    sent = _sendable(tensor)
    where = {} if how is None else how.where()
    gathered = hvd.allgather(sent, name=name, ignore_name_scope=True, **where)
    return gathered if sent.dtype == tensor.dtype else tf.bitcast(gathered, tensor.dtype)


def _sendable(tensor: Any) -> Any:
    sent_as = _SENT_AS.get(tensor.dtype)
    return tensor if sent_as is None else tf.bitcast(tensor, sent_as)
