"""Exact evaluation: means over all rows of all ranks, without padding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_runner.data.feed.feed import Feed
from horovod_runner.wire.collectives import connected
from horovod_runner.worker.checks import notes
from horovod_runner.worker.checks.captured import names_used

if TYPE_CHECKING:
    import tensorflow as tf


def evaluate(
    feed: Feed[Any] | tf.data.Dataset, measure: Callable[[Any], Mapping[str, Any]]
) -> dict[str, float]:
    """Average values per row over all rows of a dataset, on all ranks.

        def measure(batch):
            x, y = batch
            return {"accuracy": model(x).argmax(dim=1) == y}

        evaluate(valid.to_torch(256, columns), measure)    # {"accuracy": 0.97}

    Call it on every rank. Each rank measures its part of the rows, and the sums are added by one
    allreduce at the end, so the result is equal on all ranks. Rows that only pad the last batch do
    not count. Torch computes no gradients meanwhile. Put the model into evaluation mode yourself.

    Args:
        feed: from ``Shard.batches``, ``to_torch`` or ``to_tf``. With ``last_batch="drop"`` the rows
            that the feed leaves out are not measured.
        measure: called with each batch. Returns a dict with one value per row for each name: a
            tensor or an array of numbers or bools, of shape (rows,).

    Returns:
        The mean of each value over all rows.

    Raises:
        RuntimeError: there are several ranks, and ``hvd.init()`` has not been called.
        TypeError: ``feed`` does not come from a Shard, or ``measure`` returns something else.
        ValueError: ``measure`` returns values of another shape.
    """
    source = _source(feed)
    # Where the ranks cannot reach each other, that is said before the work.
    ranks = None if source.ranks == 1 else connected("evaluate adds up what the ranks measured")
    _check_mode(measure)
    sums: dict[str, Any] = {}
    rows = 0
    batches: Iterable[Any] = feed
    torch = sys.modules.get("torch")
    with nullcontext() if torch is None else torch.no_grad():
        for step, batch in enumerate(batches, source.next_step):
            real = source.real_rows(step)
            rows += real
            for name, total in _row_sums(measure(batch), source.batch_rows(step), real).items():
                sums[name] = sums[name] + total if name in sums else total
    names = sorted(sums)  # the same order on all ranks
    totals = np.array([rows, *(float(sums[name]) for name in names)])
    if ranks is not None:
        totals = ranks.add(totals)
    means = dict(zip(names, (totals[1:] / totals[0]).tolist(), strict=True))
    return {name: means[name] for name in sums}


def _check_mode(measure: Callable[[Any], Any]) -> None:
    """Warn, once, if ``measure`` uses a model of PyTorch that drops out or normalizes by batch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    layers = torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm
    for name, value in names_used(measure):
        # Keras's layers are modules of torch, too, and have no such mode.
        if not isinstance(value, torch.nn.Module) or hasattr(value, "trainable_variables"):
            continue
        found = (each for each in value.modules() if each.training and isinstance(each, layers))
        layer = next(found, None)
        if layer is not None:
            notes.mistake(
                "evaluation",
                f"evaluate measures `{name}` in training mode, in which its "
                f"{type(layer).__name__} behaves differently: call {name}.eval() before evaluate, "
                f"and {name}.train() after it.",
            )


def _source(feed: object) -> Feed[Any]:
    if isinstance(feed, Feed):
        return feed
    if "tensorflow" in sys.modules:
        from horovod_runner.data.feed.tf_feed import feed_of

        source = feed_of(feed)
        if source is not None:
            return source
    raise TypeError(
        "evaluate requires a feed of Shard.batches or to_torch, or the dataset that to_tf "
        f"returned, not {type(feed).__name__}. A dataset that map or batch made of it has lost the "
        "number of real rows: do that work in measure"
    )


def _row_sums(measured: object, rows: int, real: int) -> dict[str, Any]:
    """The sums of values per row, without padding: of ``real`` rows of a batch."""
    if not isinstance(measured, Mapping):
        raise TypeError(
            "measure must return a dict of values per row, such as {'accuracy': right}, not "
            f"{type(measured).__name__}"
        )
    sums = {}
    for name, values in measured.items():
        shape = tuple(np.shape(values))
        if shape != (rows,):
            raise ValueError(
                f"measure returned {name!r} of shape {shape} for a batch of {rows} rows: return "
                f"one value per row, of shape ({rows},). Losses have it with reduction='none'"
            )
        sums[name] = _sum(values[:real])
    return sums


def _sum(values: Any) -> Any:
    """A float64 sum; on a GPU it stays there, so that no step waits for it."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach().sum(dtype=torch.float64)
    if tensorflow is not None and tensorflow.is_tensor(values):
        return tensorflow.reduce_sum(tensorflow.cast(values, tensorflow.float64))
    return np.asarray(values, np.float64).sum()
