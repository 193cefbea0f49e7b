"""Hashes a rank's weights, so that the driver can compare those of all ranks.

No collective is involved: a rank that checks more often than others cannot hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from horovod_runner.wire.messages import Weights

_DIGEST_BYTES = 8
_SHARDED = ("DTensor", "FlatParameter", "FullyShardedDataParallel")  # of torch's FSDP


def is_part(tensor: Any) -> bool:
    """Whether a parameter, or a module of FSDP, is divided among the ranks."""
    # A parameter of DeepSpeed's ZeRO 3 has a number.
    return type(tensor).__name__ in _SHARDED or hasattr(tensor, "ds_id")


def is_sharded(model: Any) -> bool:
    """Whether a torch module's weights are divided among the ranks."""
    if not hasattr(model, "named_parameters") or not hasattr(model, "modules"):
        return False
    return any(map(is_part, (*model.modules(), *model.parameters())))


def hash_weights(model: Any, rank: int, epoch: int | None) -> Weights:
    """The message with the hashes of a rank's weights; see ``check_weights``.

    Raises:
        TypeError: ``model`` holds something that is not a tensor, or no weights.
    """
    names, digests = [], []
    for name, value in _named(model):
        names.append(name)
        # Short: it finds accidents, and need not withstand attacks.
        digests.append(hashlib.blake2b(_bytes(name, value), digest_size=_DIGEST_BYTES).digest())
    if not names:
        raise TypeError(f"check_weights: {type(model).__qualname__} has no weights")
    return Weights(rank, names if rank == 0 else [], digests, epoch)


def _named(model: Any) -> list[tuple[str, Any]]:
    if hasattr(model, "trainable_variables"):  # before torch: on torch, Keras models have both
        return [(_name(variable), variable) for variable in model.trainable_variables]
    if hasattr(model, "named_parameters"):
        return list(model.named_parameters())
    if isinstance(model, Mapping):
        return [tensor for name, value in model.items() for tensor in _inside(str(name), value)]
    if isinstance(model, (list, tuple)):
        named = ((_name(value) or str(index), value) for index, value in enumerate(model))
        return [tensor for name, value in named for tensor in _inside(name, value)]
    raise TypeError(
        "check_weights: model must be a torch module, a Keras model, or a dict or list of tensors, "
        f"got {type(model).__qualname__}"
    )


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """A tensor itself, or the tensors of a nested model or container."""
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
    # A Keras variable holds a tensor in `value`; for TensorFlow variables, `value` is a method.
    inner = getattr(value, "value", None)
    tensor = value if inner is None or callable(inner) else inner
    if hasattr(tensor, "detach"):
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy()
    array = tensor.numpy() if hasattr(tensor, "numpy") else tensor
    if not hasattr(array, "tobytes"):
        raise TypeError(
            f"check_weights: {name!r} must be a tensor, an array or a variable, got "
            f"{type(value).__qualname__}"
        )
    return array.tobytes()
