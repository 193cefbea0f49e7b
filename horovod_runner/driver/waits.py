"""Finds which ranks a collective of torch.distributed waits for. Pure: the caller passes the time.

Horovod's stall inspector knows that of Horovod's collectives. Of torch.distributed's, each rank
says which ones it has entered, and the ranks of the group that do not say so are missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.wire.measurements import Waits
from horovod_runner.wire.messages import Stall

# Some ranks pass these without waiting: a rank that is not inside need not be missing.
_ROOTED: Final = frozenset(
    ("broadcast", "_broadcast_oop", "gather", "reduce", "_reduce_oop", "scatter")
)


class TorchWaits:
    """The collectives that ranks wait in.

    Args:
        seconds: for how long a message counts; ranks repeat it while they wait.
        limits: say how long a message waits for those of other ranks.
    """

    def __init__(self, size: int, seconds: float, limits: Limits = DEFAULTS) -> None:
        self._size = size
        self._seconds = seconds
        self._gather = limits.same_warning
        self._said: dict[int, tuple[Waits, float]] = {}
        self._due: float | None = None

    def take(self, rank: int, message: Waits, now: float) -> None:
        """Record what a rank says."""
        self._said[rank] = message, now
        if self._due is None:
            self._due = now + self._gather

    def news(self, now: float) -> list[Stall] | None:
        """All stalls, once after each message when those of other ranks have come; else None."""
        if self._due is None or now < self._due:
            return None
        self._due = None
        return list(self.stalls(now))

    def ended(self, rank: int) -> None:
        """Record that a rank has ended."""
        self._said.pop(rank, None)

    def stalls(self, now: float) -> Iterable[Stall]:
        """The collectives that some ranks of their group have not entered.

        Of a broadcast, gather, reduce or scatter this is known only in a group of two ranks.
        """
        entered: dict[str, set[int]] = {}
        groups: dict[str, set[int]] = {}
        for rank, (message, at) in self._said.items():
            if now - at > self._seconds:
                continue
            for each in message.collectives:
                entered.setdefault(each.name, set()).add(rank)
                groups[each.name] = {*each.ranks} or {*range(self._size)}
        for name, ranks in entered.items():
            if len(groups[name]) > 2 and name.partition(" ")[0] in _ROOTED:
                continue
            if missing := sorted(groups[name] - ranks):
                yield Stall(name, tuple(missing))
