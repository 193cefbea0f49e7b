"""Small collectives with the library through which `main` has connected the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Totals = npt.NDArray[np.float64]


def connected_library() -> Callable[[], SmallCollectives] | None:
    """What makes the collectives of an initialized Horovod, or else of torch.distributed.

    None if the ranks are not connected yet. Imports nothing: only modules that are loaded count.
    """
    makers = {"torch": _of_horovod_torch, "tensorflow": _of_horovod_tensorflow}
    for framework, make in makers.items():
        horovod = sys.modules.get(f"horovod.{framework}")
        if horovod is not None and horovod.is_initialized():
            return partial(make, horovod)
    torch = sys.modules.get("torch")
    distributed = None if torch is None else torch.distributed
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return partial(_of_torch, torch)
    return None


def connected(
    what: str = "load_checkpoint broadcasts from a rank to the others",
) -> SmallCollectives:
    """The collectives of the library that ``main`` has initialized; ``what`` needs them.

    Raises:
        RuntimeError: the ranks are not connected yet.
    """
    make = connected_library()
    if make is not None:
        return make()
    raise RuntimeError(
        f"{what}, and the ranks are not connected yet: call hvd.init() before it (or "
        "torch.distributed.init_process_group())"
    )


@dataclass(frozen=True)
class SmallCollectives:
    """A library's collectives for little data. All ranks make the same calls in the same order.

    Each has a name, which is shown where a rank waits for the others for ever.

    Attributes:
        broadcast_array: returns the array of a rank; gets that rank and a name, too.
        sum_arrays: returns the sum of the arrays of all ranks; gets a name, too.
    """

    place: tuple[int, int]
    broadcast_array: Callable[[Any, int, str], Any]
    sum_arrays: Callable[[Any, str], Any]

    def broadcast(self, data: bytes, count: int, root: int = 0, name: str = "checkpoint") -> bytes:
        """Broadcast ``count`` bytes from the rank ``root``, which alone has the data."""
        array = np.frombuffer(bytearray(data) if data else bytearray(count), np.uint8)
        return bytes(self.broadcast_array(array, root, f"horovod_runner.{name}").tobytes())

    def gather(self, numbers: Sequence[int], name: str = "commits") -> list[list[int]]:
        """The numbers of all ranks, in the order of the ranks; equally many on each."""
        # A sum with the rows of the others left zero: Horovod answers it from its cache of
        # responses, which it does not for an allgather.
        rank, size = self.place
        rows = np.zeros((size, len(numbers)), np.int64)
        rows[rank] = numbers
        return self.sum_arrays(rows, f"horovod_runner.{name}").tolist()  # type: ignore[no-any-return]

    def add(self, totals: Totals) -> Totals:
        """The sums over all ranks of arrays of float64 of the same length."""
        return np.asarray(self.sum_arrays(totals, "horovod_runner.evaluate"))


#: The collectives of a run with one rank: each returns what it gets.
ALONE = SmallCollectives((0, 1), lambda array, _root, _name: array, lambda array, _name: array)


def _of_horovod_torch(hvd: Any) -> SmallCollectives:
    from torch import from_numpy

    return SmallCollectives(
        (hvd.rank(), hvd.size()),
        lambda array, root, name: hvd.broadcast_(from_numpy(array), root, name=name).numpy(),
        lambda array, name: hvd.allreduce_(from_numpy(array), op=hvd.Sum, name=name).numpy(),
    )


def _of_horovod_tensorflow(hvd: Any) -> SmallCollectives:
    import tensorflow

    def on_cpu(collective: Callable[..., Any], array: Any, **options: Any) -> Any:
        with tensorflow.device("/cpu:0"):
            return collective(tensorflow.constant(array), **options).numpy()

    return SmallCollectives(
        (hvd.rank(), hvd.size()),
        lambda array, root, name: on_cpu(hvd.broadcast, array, root_rank=root, name=name),
        lambda array, name: on_cpu(hvd.allreduce, array, op=hvd.Sum, name=name),
    )


def _of_torch(torch: Any) -> SmallCollectives:
    distributed = torch.distributed
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"

    def on_device(collective: Callable[..., Any], array: Any, *options: Any) -> Any:
        tensor = torch.from_numpy(array).to(device)
        collective(tensor, *options)
        return tensor.cpu().numpy()

    return SmallCollectives(
        (distributed.get_rank(), distributed.get_world_size()),
        lambda array, root, _: on_device(distributed.broadcast, array, root),
        lambda array, _: on_device(distributed.all_reduce, array),
    )
