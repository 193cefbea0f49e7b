"""Finds which ranks a collective of torch.distributed waits for. Pure: the caller passes the time.

Horovod's stall inspector knows that of Horovod's collectives. Of torch.distributed's, each rank
says which ones it has entered, and the ranks of the group that do not say so are missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from horovod_runner.wire.measurements import Waits
from horovod_runner.wire.messages import Stall


class TorchWaits:
    """The collectives that ranks wait in.

    Args:
        size: the number of ranks.
        seconds: for how long a message counts; ranks repeat it while they wait.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._said: dict[int, tuple[Waits, float]] = {}

    def take(self, rank: int, message: Waits, now: float) -> None:
        """Record what a rank says."""
        self._said[rank] = message, now

    def ended(self, rank: int) -> None:
        """Record that a rank has ended."""
        self._said.pop(rank, None)

    def stalls(self, now: float) -> Iterable[Stall]:
        """The collectives that some ranks of their group have not entered."""
        entered: dict[str, set[int]] = {}
        groups: dict[str, set[int]] = {}
        for rank, (message, at) in self._said.items():
            if now - at > self._seconds:
                continue
            for each in message.collectives:
                entered.setdefault(each.name, set()).add(rank)
                groups[each.name] = {*each.ranks} or {*range(self._size)}
        for name, ranks in entered.items():
            if missing := sorted(groups[name] - ranks):
                yield Stall(name, tuple(missing))
