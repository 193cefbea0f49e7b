"""Compares the hashes of the ranks' weights, on the driver."""

from __future__ import annotations

from horovod_runner.errors import SyncError
from horovod_runner.wire.messages import Weights

_MOST_WAITING = 100


class SyncCheck:
    """Compares the n-th hashes of every rank with the n-th of rank 0.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._waiting: list[list[Weights]] = [[] for _ in range(size)]
        #: How often all ranks were compared.
        self.compared = 0

    def take(self, message: Weights) -> None:
        """Record a rank's hashes, and compare where all ranks have sent theirs.

        Raises:
            SyncError: they differ from rank 0's, or a rank checks far more often than another.
        """
        queue = self._waiting[message.rank]
        queue.append(message)
        if len(queue) > _MOST_WAITING:
            behind = next(rank for rank, sent in enumerate(self._waiting) if not sent)
            raise SyncError(
                f"rank {message.rank} checked its weights {len(queue)} times more often than rank "
                f"{behind}: call check_weights on every rank"
            )
        while all(self._waiting):
            self.compared += 1
            _compare([queue.pop(0) for queue in self._waiting])


def _compare(all_ranks: list[Weights]) -> None:
    first = all_ranks[0]
    when = "" if first.epoch is None else f" after epoch {first.epoch}"
    for other in all_ranks[1:]:
        if other.epoch != first.epoch:
            raise SyncError(
                f"rank {other.rank} checked its weights after epoch {other.epoch} and rank 0 "
                f"after epoch {first.epoch}: the ranks do not train the same epochs"
            )
        if len(other.digests) != len(first.digests):
            raise SyncError(
                f"rank {other.rank} has {len(other.digests)} weights{when}, and rank 0 has "
                f"{len(first.digests)}: they do not train the same model"
            )
        pairs = enumerate(zip(other.digests, first.digests, strict=True))
        differ = [index for index, (digest, first_digest) in pairs if digest != first_digest]
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
