"""How gradients are reduced: what a DistributedOptimizer was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reduction:
    """Of all gradients of one optimizer.

    Attributes:
        op: Horovod's Average or Sum.
        compression: has ``compress`` and ``decompress``, as Horovod's; or is BFloat16.
        predivide: what the gradients are divided by before they are added up; the rest of the
            division by the number of ranks follows.
        sparse_as_dense: whether sparse gradients are made dense first.
        groups: how many groups of gradients are reduced as one; 0 reduces each by itself.
        device_dense, device_sparse: TensorFlow's names of the devices to reduce on.
    """

    op: Any
    compression: Any
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: int = 0
    device_dense: str = ""
    device_sparse: str = ""

    def options(self, hvd: Any) -> dict[str, Any]:
        """What Horovod's allreduce is told."""
        if self.predivide == 1.0:
            return {"op": self.op}
        return {
            "op": hvd.Sum,
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide / hvd.size(),
        }

    def grouped(self, tensors: list[Any]) -> list[list[Any]]:
        """Tensors in ``groups`` groups, or fewer."""
        count = -(-len(tensors) // self.groups)
        return [tensors[start : start + count] for start in range(0, len(tensors), count)]


class BFloat16:
    """Sends gradients with the exponent of a float32 and 8 bits of its fraction.

    Horovod adds up no such numbers. So each rank is sent its part of them by all others, adds that
    up in float32 and hands the sum to all: as many bytes as an allreduce of 16 bit numbers.
    """
