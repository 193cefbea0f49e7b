"""The settings by which a DistributedOptimizer reduces gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one optimizer are reduced.

    Attributes:
        op: Horovod's Average or Sum.
        compression: a class with ``compress`` and ``decompress`` like Horovod's, or BFloat16.
        predivide: the gradients are divided by this before the sum, and by the number of ranks
            over this after the sum.
        sparse_as_dense: whether sparse gradients are converted to dense ones first.
        groups: the number of groups of gradients, each reduced in one operation; 0 reduces each
            gradient separately.
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
        """Return the keyword arguments of Horovod's allreduce."""
        if self.predivide == 1.0:
            return {"op": self.op}
        return {
            "op": hvd.Sum,
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide / hvd.size(),
        }

    def grouped(self, tensors: list[Any]) -> list[list[Any]]:
        """Split tensors into at most ``groups`` groups."""
        count = -(-len(tensors) // self.groups)
        return [tensors[start : start + count] for start in range(0, len(tensors), count)]


class BFloat16:
    """Marks gradients that are sent as bfloat16: float32's exponent and 8 bits of its fraction.

    Horovod cannot sum bfloat16. Each rank therefore receives its part of the gradients from all
    ranks, sums it in float32, and sends the sum to all: the traffic of a 16-bit allreduce.
    """
