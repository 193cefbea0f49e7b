"""Small collectives with the library through which `main` has connected the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Library = Literal["horovod.torch", "horovod.tensorflow", "torch"]
Totals = npt.NDArray[np.float64]


class Collectives(Protocol):
    """All ranks make the same calls in the same order."""

    def broadcast(self, data: bytes, count: int, root: int = 0, name: str = "checkpoint") -> bytes:
        """Broadcast bytes from a rank.

        Args:
            data: the bytes; read on rank ``root`` only.
            count: the number of bytes, the same on all ranks.
            root: the sending rank.
            name: shown where a rank waits for the others for ever.
        """

    def gather(self, numbers: Sequence[int], name: str = "commits") -> list[list[int]]:
        """The numbers of all ranks, in the order of the ranks; equally many on each.

        Args:
            numbers: this rank's.
            name: shown where a rank waits for the others for ever.
        """

    def add(self, totals: Totals) -> Totals:
        """The sums over all ranks of arrays of float64 of the same length."""


def connected_library() -> tuple[Library, Any] | None:
    """The name and module of an initialized Horovod, or of torch for torch.distributed.

    None if the ranks are not connected yet. Imports nothing: only modules that are loaded count.
    """
    names: tuple[Library, ...] = ("horovod.torch", "horovod.tensorflow")
    for name in names:
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            return name, horovod
    torch = sys.modules.get("torch")
    distributed = None if torch is None else torch.distributed
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "torch", torch
    return None


def connected(what: str = "load_checkpoint broadcasts from a rank to the others") -> Collectives:
    """The collectives of the library that ``main`` has initialized.

    Args:
        what: what needs them, for the error.

    Raises:
        RuntimeError: the ranks are not connected yet.
    """
    found = connected_library()
    if found is not None:
        name, module = found
        makers: dict[str, Callable[[Any], Collectives]] = {
            "horovod.torch": _Torch,
            "horovod.tensorflow": _TensorFlow,
            "torch": _Distributed,
        }
        return makers[name](module)
    raise RuntimeError(
        f"{what}, and the ranks are not connected yet: call hvd.init() before it (or "
        "torch.distributed.init_process_group())"
    )


class _Torch:
    """With ``horovod.torch``."""

    def __init__(self, horovod: Any) -> None:
        self._horovod = horovod

    def broadcast(self, data: bytes, count: int, root: int = 0, name: str = "checkpoint") -> bytes:
        import torch

        buffer = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8)
        self._horovod.broadcast_(buffer, root, name=f"horovod_runner.{name}")
        return bytes(buffer.numpy().tobytes())

    def gather(self, numbers: Sequence[int], name: str = "commits") -> list[list[int]]:
        import torch

        ours = torch.tensor([numbers], dtype=torch.int64)
        gathered = self._horovod.allgather(ours, name=f"horovod_runner.{name}")
        return gathered.tolist()  # type: ignore[no-any-return]

    def add(self, totals: Totals) -> Totals:
        import torch

        ours, sums = torch.from_numpy(totals), self._horovod.Sum
        return np.asarray(
            self._horovod.allreduce(ours, op=sums, name="horovod_runner.evaluate").numpy()
        )


class _TensorFlow:
    """With ``horovod.tensorflow``."""

    def __init__(self, horovod: Any) -> None:
        self._horovod = horovod

    def broadcast(self, data: bytes, count: int, root: int = 0, name: str = "checkpoint") -> bytes:
        import tensorflow

        array = np.frombuffer(data or bytes(count), np.uint8)
        with tensorflow.device("/cpu:0"):
            tensor = tensorflow.constant(array)
            received = self._horovod.broadcast(tensor, root, name=f"horovod_runner.{name}")
        return bytes(received.numpy().tobytes())

    def gather(self, numbers: Sequence[int], name: str = "commits") -> list[list[int]]:
        import tensorflow

        with tensorflow.device("/cpu:0"):
            ours = tensorflow.constant([list(numbers)], tensorflow.int64)
            gathered = self._horovod.allgather(ours, name=f"horovod_runner.{name}")
        return gathered.numpy().tolist()  # type: ignore[no-any-return]

    def add(self, totals: Totals) -> Totals:
        import tensorflow

        sums = self._horovod.Sum
        with tensorflow.device("/cpu:0"):
            ours = tensorflow.constant(totals)
            summed = self._horovod.allreduce(ours, op=sums, name="horovod_runner.evaluate")
        return np.asarray(summed.numpy())


class _Distributed:
    """With ``torch.distributed``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"

    def broadcast(self, data: bytes, count: int, root: int = 0, name: str = "checkpoint") -> bytes:
        torch = self._torch
        buffer = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8)
        buffer = buffer.to(self._device)
        torch.distributed.broadcast(buffer, root)
        return bytes(buffer.cpu().numpy().tobytes())

    def gather(self, numbers: Sequence[int], name: str = "") -> list[list[int]]:
        torch = self._torch
        ours = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        parts = [torch.empty_like(ours) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, ours)
        return [part.tolist() for part in parts]

    def add(self, totals: Totals) -> Totals:
        summed = self._torch.from_numpy(totals).to(self._device)
        self._torch.distributed.all_reduce(summed)
        return np.asarray(summed.cpu().numpy())
