"""Batch normalization: recognizes it, because it makes a training depend on the number of ranks.

Its statistics are those of a rank's own rows, and a batch with one row has none. A feed with
``global_batch`` then gives equal parts to all ranks in all steps, and says so once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from horovod_runner.worker.api import log_to_driver
from horovod_runner.worker.checks.batch_norms import keras_layers, torch_layers

if TYPE_CHECKING:
    from horovod_runner.data.feed.feed import Feed

# Nodes of a graph that hide the operations of a model.
_OPAQUE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")
_said: list[str] = []


def check_graph(feed: Feed[Any], roots: Iterable[Any]) -> None:
    """Give equal parts if the losses, before backward, depend on batch normalization in PyTorch."""
    names = _nodes_of(roots)
    if "batch normalization" in names or (names & {*_OPAQUE} and _has_torch_layers()):
        _go_on_with_equal_parts(feed)


def check_layers(feed: Feed[Any]) -> bool:
    """Give equal parts if Keras trains batch normalization here; returns whether it does."""
    found = any(getattr(layer, "trainable", False) for layer in list(keras_layers))
    if found:
        _go_on_with_equal_parts(feed)
    return found


def _go_on_with_equal_parts(feed: Feed[Any]) -> None:
    feed.use_equal_parts()
    if not _said and feed.rank == 0:
        log_to_driver(
            "HorovodRunner: the model has batch normalization, whose statistics are those of each "
            "rank's own rows. So the training depends on np in spite of global_batch. It goes on "
            f"with equal parts, {feed.batch_rows(0)} rows on each of {feed.ranks} ranks; rows are "
            "repeated where the rows of a step are fewer. SyncBatchNorm (of torch.nn or "
            "horovod.torch, on GPUs) has the statistics of all ranks; GroupNorm and LayerNorm "
            "need none."
        )
    _said.append("batch normalization")


def _nodes_of(roots: Iterable[Any]) -> set[str]:
    """Names of the opaque nodes of a graph, and "batch normalization" if it computes statistics."""
    found = set()
    nodes = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        name = type(node).__name__  # a function of the user's may have set ctx.name
        if _normalizes(node, name):
            return {"batch normalization"}
        found |= {opaque for opaque in _OPAQUE if opaque in name}
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _normalizes(node: Any, name: str) -> bool:
    """Whether a node is a batch normalization with the statistics of the batch."""
    # NativeBatchNormBackward0, CudnnBatchNormBackward0, ...; SyncBatchNormBackward has no number.
    if "BatchNorm" not in name or not name[-1].isdigit() or not getattr(node, "_saved_training", 1):
        return False
    # Instance normalization is one whose batch has one row.
    outputs = getattr(node, "_input_metadata", None)
    return not outputs or outputs[0].shape[0] != 1


def _has_torch_layers() -> bool:
    """Whether a module for batch normalization, without synchronization, is in training mode."""
    batch_norm = sys.modules["torch"].nn.modules.batchnorm._BatchNorm
    return any(
        getattr(layer, "training", False) and type(layer).forward is batch_norm.forward
        for layer in list(torch_layers)
    )
