"""``layer.adapt`` over all ranks: each rank counts its own rows, one collective adds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.feed.rows_once import RowsOnce
from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.keras.fitting.patch import feed_behind
from horovod_runner.wire.collectives import connected
from horovod_runner.worker import context

_FOR_TEXT = ("TextVectorization", "StringLookup", "IntegerLookup")


def adapt(layer: Any, data: Any, part: str | None = None) -> Any:
    """Adapt a preprocessing layer to the rows of all ranks, the same on every rank.

        text = hvd.adapt(keras.layers.TextVectorization(), data.to_tf(256, {"x": "review"}))

    ``layer.adapt`` would count the rows of its rank only, so that each rank has another vocabulary
    or another mean. Call this function on every rank, after ``hvd.init()`` and before ``fit``. It
    reads the rows once, without padding, and changes no epoch of the feed.

    Args:
        layer: Normalization, Discretization, TextVectorization, StringLookup or IntegerLookup.
        data: a feed or a dataset of a Shard, also after ``map``. Or this rank's rows as an array,
            a list, or an iterable of batches.
        part: the part of a batch that the layer gets. None: the only one, or the first of a tuple,
            which ``fit`` takes as x.

    Returns:
        The layer. The boundaries of Discretization are estimates, as in Keras: the layer's epsilon
        says how good.

    Raises:
        RuntimeError: the ranks are not connected yet.
        TypeError: the layer is of another kind.
        ValueError: the layer has its statistics already, there are no rows, or ``part`` is not in
            a batch.
    """
    rank = context.current()
    size = 1 if rank is None else rank.size
    if size > 1:
        connected("adapt adds up what the ranks have counted")
    counted = _counted(layer)
    for batch in _batches(data, part):
        counted.count(batch)
    state = counted.state()
    states = [state]
    if size > 1:
        states = collectives().hvd.allgather_object(state, name="horovod_runner.adapt")
    states = [each for each in states if each is not None]
    if not states:
        raise ValueError(f"adapt found no rows for {layer.name}: check the filter or query")
    counted.finish(states)
    return layer


class _Moments:
    """Of Normalization: shape of a row, values of each mean, means, sums of squared differences."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._total: tuple[tuple[int, ...], int, Any, Any] | None = None

    def count(self, batch: Any) -> None:
        values = np.asarray(_numbers(batch), np.float64)
        if values.ndim == 1 and self.layer.axis:
            values = values[:, None]  # as fit passes one column
        kept = {axis % values.ndim for axis in self.layer.axis}
        axes = tuple(axis for axis in range(values.ndim) if axis not in kept)
        mean = values.mean(axis=axes, keepdims=True)
        squares = ((values - mean) ** 2).sum(axis=axes)
        count = int(np.prod([values.shape[axis] for axis in axes]))
        found = (values.shape[1:], count, mean.reshape(squares.shape), squares)
        self._total = found if self._total is None else _added(self._total, found)

    def state(self) -> Any:
        """The counts of this rank; None if it got no rows."""
        return self._total

    def finish(self, states: Sequence[Any]) -> None:
        """Set the layer by what the ranks have counted."""
        total = states[0]
        for state in states[1:]:
            total = _added(total, state)
        shape, count, mean, squares = total
        if not self.layer.built:
            self.layer.build((None, *shape))
        self.layer.adapt_mean.assign(mean.astype("float32"))
        self.layer.adapt_variance.assign((squares / count).astype("float32"))
        self.layer.finalize_state()


def _added(first: Any, second: Any) -> Any:
    """The moments of two sets of rows together (Chan, Golub and LeVeque, 1979)."""
    shape, count, mean, squares = first
    other_shape, other_count, other_mean, other_squares = second
    if shape != other_shape:
        raise ValueError(
            f"adapt found rows of shape {shape} and of shape {other_shape}: Normalization needs "
            "rows of one shape"
        )
    both = count + other_count
    step = other_mean - mean
    squares = squares + other_squares + step**2 * (count * other_count / both)
    return shape, both, mean + step * (other_count / both), squares


class _Tokens:
    """Of a vocabulary: tokens and counts; for TF-IDF also by document, and the documents."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._lookup = getattr(layer, "_lookup_layer", layer)
        self._by_document = self._lookup.output_mode == "tf_idf"
        layer.reset_state()

    def count(self, batch: Any) -> None:
        import tensorflow as tf

        if not isinstance(batch, tf.RaggedTensor | tf.SparseTensor):
            batch = tf.convert_to_tensor(_numbers(batch))
            if batch.shape.rank == 1:  # each row is a document
                batch = tf.expand_dims(batch, -1)
        self.layer.update_state(batch)

    def state(self) -> Any:
        tables = [self._lookup.token_counts]
        documents = 0
        if self._by_document:
            tables.append(self._lookup.token_document_counts)
            documents = int(self._lookup.num_documents.numpy())
        counts = [tuple(each.numpy() for each in table.export()) for table in tables]
        return (counts, documents) if len(counts[0][0]) else None

    def finish(self, states: Sequence[Any]) -> None:
        self.layer.reset_state()
        tables = [self._lookup.token_counts]
        if self._by_document:
            tables.append(self._lookup.token_document_counts)
            self._lookup.num_documents.assign(sum(documents for _, documents in states))
        for number, table in enumerate(tables):
            tokens = np.concatenate([counts[number][0] for counts, _ in states])
            counts = np.concatenate([counts[number][1] for counts, _ in states])
            unique, places = np.unique(tokens, return_inverse=True)
            total = np.zeros(len(unique), counts.dtype)
            np.add.at(total, places, counts)
            table.insert(unique, total)
        self.layer.finalize_state()


class _Quantiles:
    """Of Discretization: values and weights, an array of shape (2, values)."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        layer.reset_state()

    def count(self, batch: Any) -> None:
        self.layer.update_state(_numbers(batch))

    def state(self) -> Any:
        return self.layer.summary if self.layer.summary.size else None

    def finish(self, states: Sequence[Any]) -> None:
        summary = np.concatenate(states, axis=1)
        self.layer.summary = summary[:, np.argsort(summary[0], kind="stable")]
        self.layer.finalize_state()


def _counted(layer: Any) -> _Moments | _Tokens | _Quantiles:
    """Counts what a layer learns from rows."""
    kinds = keras.layers
    lookup: Any = getattr(layer, "_lookup_layer", layer)
    kind: type[_Moments | _Tokens | _Quantiles]
    if isinstance(layer, kinds.Normalization):
        kind, has, by = _Moments, layer.input_mean is not None, "mean= and variance="
    elif isinstance(layer, kinds.Discretization):
        kind, has, by = _Quantiles, layer.num_bins is None, "bin_boundaries="
    elif isinstance(layer, tuple(getattr(kinds, name) for name in _FOR_TEXT)):
        kind, has, by = _Tokens, lookup._has_input_vocabulary, "vocabulary= or set_vocabulary"
    else:
        raise TypeError(
            f"adapt does not know {type(layer).__name__}: it adapts Normalization, Discretization, "
            f"{', '.join(_FOR_TEXT)}. For a FeatureSpace, adapt the layers of its preprocessors"
        )
    if has:
        raise ValueError(
            f"{layer.name} has its statistics already, by {by}: leave that out, or do not adapt "
            "the layer"
        )
    return kind(layer)


def _batches(data: Any, part: str | None) -> Iterator[Any]:
    """The layer's part of each batch of this rank's rows."""
    names: Sequence[str] = ()
    if isinstance(data, Feed):
        batches: Any = RowsOnce(data)
        names, has_rows = batches.names, batches.rows > 0
    elif feed_behind(data) is not None:
        batches, once = _rows_of_dataset(data)
        names, has_rows = once.names, once.rows > 0
    elif hasattr(data, "shape") or (isinstance(data, list) and data and not _is_batch(data[0])):
        batches, has_rows = [data], len(data) > 0
    else:
        batches, has_rows = data, True
    for batch in batches if has_rows else ():
        yield _part_of(batch, part, names)


def _is_batch(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, list | tuple | Mapping)


def _rows_of_dataset(data: Any) -> Any:
    from horovod_runner.data.feed import tf_feed

    found = tf_feed.rows_once(data)
    if found is None:
        raise ValueError(
            "adapt reads a Shard's dataset without padding, so that batches differ in their rows, "
            "and this dataset was changed by other functions than map and prefetch, or map "
            "requires batches of one size: pass the dataset that to_tf returned"
        )
    return found


def _part_of(batch: Any, part: str | None, names: Sequence[str]) -> Any:
    if isinstance(batch, tuple | list) and part is not None and len(batch) == len(names):
        batch = dict(zip(names, batch, strict=True))
    elif isinstance(batch, tuple):
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return batch
    if part is None and len(batch) == 1:
        return next(iter(batch.values()))
    if part not in batch:
        there = ", ".join(map(repr, batch))
        raise ValueError(f"adapt got part={part!r}, and a batch has the parts {there}: name one")
    return batch[part]


def _numbers(value: Any) -> Any:
    """An array; text and tensors of TensorFlow stay."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value
