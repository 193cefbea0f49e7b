"""Whether the ranks' weights are equal: each rank hashes its own, the driver compares.

No collective has a part in it, so a rank that asks for more checks than another hangs nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from horovod_runner.errors import SyncError
from horovod_runner.messages import Weights

_DIGEST_BYTES = 8
_MOST_WAITING = 100


def hash_weights(model: Any, rank: int, epoch: int | None) -> Weights:
    """The message that tells a rank's weights.

    Args:
        model: a torch module or a Keras model, whose trainable weights count; or tensors, arrays
            and variables, by name or in a row.
        rank: whose they are.
        epoch: after which epoch.

    Raises:
        TypeError: something among them is no tensor.
    """
    names, digests = [], []
    for name, value in _named(model):
        names.append(name)
        # A check against accidents, not against anybody.
        digests.append(hashlib.blake2b(_bytes(name, value), digest_size=_DIGEST_BYTES).digest())
    if not names:
        raise TypeError(f"check_sync was given a {type(model).__qualname__} without any weights")
    return Weights(rank, names if rank == 0 else [], digests, epoch)


class SyncCheck:
    """The driver's: compares the n-th message of each rank with the n-th of all others.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._waiting: list[list[Weights]] = [[] for _ in range(size)]
        #: How often all ranks were compared.
        self.compared = 0

    def take(self, message: Weights) -> None:
        """Take in what a rank sent.

        Raises:
            SyncError: it differs from what another rank sent.
        """
        own = self._waiting[message.rank]
        own.append(message)
        if len(own) > _MOST_WAITING:
            behind = next(rank for rank, sent in enumerate(self._waiting) if not sent)
            raise SyncError(
                f"rank {message.rank} checked its weights {len(own)} times more often than rank "
                f"{behind}: call check_sync on every rank"
            )
        while all(self._waiting):
            self.compared += 1
            _compare([each.pop(0) for each in self._waiting])


def _compare(all_ranks: list[Weights]) -> None:
    first = all_ranks[0]
    when = "" if first.epoch is None else f" after epoch {first.epoch}"
    for other in all_ranks[1:]:
        if other.epoch != first.epoch:
            raise SyncError(
                f"rank {other.rank} checked its weights after epoch {other.epoch} where rank 0 did "
                f"after epoch {first.epoch}: the ranks do not train the same epochs"
            )
        if len(other.digests) != len(first.digests):
            raise SyncError(
                f"rank {other.rank} has {len(other.digests)} weights{when}, and rank 0 has "
                f"{len(first.digests)}: they do not train the same model"
            )
        pairs = enumerate(zip(other.digests, first.digests, strict=True))
        differ = [index for index, (own, zeroth) in pairs if own != zeroth]
        if differ:
            name = first.names[differ[0]] if differ[0] < len(first.names) else "one"
            raise SyncError(
                f"the ranks' weights differ{when}: rank {other.rank} is the first that differs "
                f"from rank 0, in {name} ({len(differ)} of {len(first.digests)} weights). Either "
                "the gradients are not averaged (the optimizer is not the one that "
                "hvd.DistributedOptimizer returned; Lightning without strategy=HorovodStrategy()) "
                "or the ranks began with different weights (no broadcast of rank 0's before the "
                "first step)"
            )


def _named(model: Any) -> list[tuple[str, Any]]:
    if hasattr(model, "trainable_variables"):  # before torch: Keras's models there are both
        return [(_name(variable), variable) for variable in model.trainable_variables]
    if hasattr(model, "named_parameters"):
        return list(model.named_parameters())
    if isinstance(model, Mapping):
        return [each for name, value in model.items() for each in _inside(str(name), value)]
    if isinstance(model, (list, tuple)):
        named = ((_name(value) or str(index), value) for index, value in enumerate(model))
        return [each for name, value in named for each in _inside(name, value)]
    raise TypeError(
        f"check_sync compares the weights of a torch module or a Keras model, or tensors by name, "
        f"not a {type(model).__qualname__}"
    )


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """A tensor, or those of a model or a list that stands for one."""
    nested = hasattr(value, "trainable_variables") or hasattr(value, "named_parameters")
    if not (nested or isinstance(value, (Mapping, list, tuple))):
        return [(name, value)]
    return [(f"{name}/{inner}", tensor) for inner, tensor in _named(value)]


def _name(value: Any) -> str:
    for attribute in ("path", "name"):
        name = getattr(value, attribute, None)
        if isinstance(name, str):
            return name
    return ""


def _bytes(name: str, value: Any) -> Any:
    """The bytes of a tensor's elements."""
    # Keras's variables hold a tensor of the backend; TensorFlow's have a method of that name.
    inner = getattr(value, "value", None)
    tensor = value if inner is None or callable(inner) else inner
    if hasattr(tensor, "detach"):
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy()
    array = tensor.numpy() if hasattr(tensor, "numpy") else tensor
    if not hasattr(array, "tobytes"):
        raise TypeError(
            f"check_sync cannot compare {name!r}, a {type(value).__qualname__}: it takes tensors, "
            "arrays and variables"
        )
    return array.tobytes()
