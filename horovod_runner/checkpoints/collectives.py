"""Small collectives with the library through which `main` has connected the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod_runner.common.connected import connected_library


class Collectives(Protocol):
    """What loading needs. All ranks make the same calls in the same order."""

    def broadcast(self, data: bytes, count: int, root: int = 0) -> bytes:
        """Broadcast bytes from a rank.

        Args:
            data: the bytes; read on rank ``root`` only.
            count: the number of bytes, the same on all ranks.
            root: the sending rank.
        """

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, in the order of the ranks; equally many on each."""


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

    def broadcast(self, data: bytes, count: int, root: int = 0) -> bytes:
        import torch

        buffer = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8)
        self._horovod.broadcast_(buffer, root, name="horovod_runner.checkpoint")
        return bytes(buffer.numpy().tobytes())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        import torch

        ours = torch.tensor([numbers], dtype=torch.int64)
        gathered = self._horovod.allgather(ours, name="horovod_runner.commits")
        return gathered.tolist()  # type: ignore[no-any-return]


class _TensorFlow:
    """With ``horovod.tensorflow``."""

    def __init__(self, horovod: Any) -> None:
        self._horovod = horovod

    def broadcast(self, data: bytes, count: int, root: int = 0) -> bytes:
        import numpy
        import tensorflow

        array = numpy.frombuffer(data or bytes(count), numpy.uint8)
        with tensorflow.device("/cpu:0"):
            tensor = tensorflow.constant(array)
            received = self._horovod.broadcast(tensor, root, name="horovod_runner.checkpoint")
        return bytes(received.numpy().tobytes())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        import tensorflow

        with tensorflow.device("/cpu:0"):
            ours = tensorflow.constant([list(numbers)], tensorflow.int64)
            gathered = self._horovod.allgather(ours, name="horovod_runner.commits")
        return gathered.numpy().tolist()  # type: ignore[no-any-return]


class _Distributed:
    """With ``torch.distributed``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"

    def broadcast(self, data: bytes, count: int, root: int = 0) -> bytes:
        torch = self._torch
        buffer = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8)
        buffer = buffer.to(self._device)
        torch.distributed.broadcast(buffer, root)
        return bytes(buffer.cpu().numpy().tobytes())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        torch = self._torch
        ours = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        parts = [torch.empty_like(ours) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, ours)
        return [part.tolist() for part in parts]
