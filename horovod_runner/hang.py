"""Decides when a run hangs, and says who waits for whom. Pure: it is told the time.

There is reason to look closer once Horovod's stall inspector finds a tensor that some ranks wait
for, once all ranks are idle, or one is frozen; or an idle one is found in the middle of a
collective: native code that keeps the interpreter's lock may stop Horovod's own thread, and with it
the stall inspector. If that lasts for ``timeout`` seconds in which no
rank prints or reports anything, the run hangs. What a rank computes meanwhile is no sign of
progress: a loop that polls for what never comes looks like one that evaluates a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from horovod_runner import stacks
from horovod_runner.messages import Alive, Stall
from horovod_runner.topology import ranks_text

DEFAULT_SECONDS: Final = 1800.0  # as long as torch.distributed waits for a collective
WARN_SECONDS: Final = 60  # after which Horovod itself warns
_IDLE_WARN_SECONDS = 300.0  # a download may be quiet for minutes
_ANSWER_SECONDS = 3.0
_SLACK_SECONDS = 2.0
_SHOWN_TENSORS = 3

Step = Literal["look", "warn", "end"]


def check_seconds(timeout: float | None) -> int:
    """How long a tensor may wait before somebody looks; whole seconds, for Horovod.

    It tells of a tensor that it knows from earlier steps after up to three times as long.
    """
    return WARN_SECONDS if timeout is None else max(1, min(WARN_SECONDS, int(timeout / 6)))


@dataclass
class _Rank:
    activity: Alive = field(default_factory=Alive)
    stack: str | None = None  # None: asked for, or never
    waits: bool = False  # in a collective, idle


class HangWatch:
    """Watches over one run.

    Args:
        timeout: seconds without progress after which the run is to end; None for never.
        check: seconds between two looks, and what Horovod's stall inspector was set to.
    """

    def __init__(self, timeout: float | None, check: float) -> None:
        self._timeout = timeout
        self._check = check
        share = _IDLE_WARN_SECONDS if timeout is None else min(_IDLE_WARN_SECONDS, timeout / 2)
        self._idle_limit = max(check, share)
        self._ranks: dict[int, _Rank] = {}
        self._stalls: dict[str, tuple[Stall, float]] = {}
        self._since: float | None = None
        self._looked: float | None = None
        self._peeked: float | None = None
        self._warned = False

    def started(self, rank: int) -> None:
        """A rank's worker runs."""
        self._ranks[rank] = _Rank()

    def ended(self, rank: int) -> None:
        """A rank has ended: the others may still wait for it."""
        self._ranks.pop(rank, None)

    def alive(self, rank: int, activity: Alive, now: float) -> None:
        """What a rank does."""
        if rank in self._ranks:
            self._ranks[rank].activity = activity
            self._ranks[rank].waits &= activity.idle >= self._idle_limit
            self._progress(now - activity.quiet)

    def _progress(self, moment: float) -> None:
        if self._since is not None:
            self._since = max(self._since, moment)

    def stalled(self, stalls: Iterable[Stall], now: float) -> None:
        """Horovod's stall inspector has spoken."""
        for stall in stalls:
            self._stalls[stall.tensor] = (stall, now)

    def shown(self, rank: int, text: str) -> None:
        """A rank's stacks have come."""
        if rank in self._ranks:
            known = self._ranks[rank]
            known.stack = text
            known.waits = known.activity.idle >= self._idle_limit and stacks.in_collective(text)

    def step(self, now: float) -> Step | None:
        """What is to be done now, if anything: look at all stacks, warn, or end the run."""
        # Horovod repeats itself at every check while a tensor waits. After a gap it is another
        # step's: slow steps are no hang.
        lately = now - 1.5 * self._check - _SLACK_SECONDS
        self._stalls = {name: one for name, one in self._stalls.items() if one[1] > lately}
        waited = self._waited()
        if waited is None:
            self._since = self._looked = None
            self._warned = False
            return self._peek(now)
        if self._since is None:
            self._since = now - waited
        if self._looked is not None:
            return self._say(now, self._looked)
        if self._is_over(now) or not self._warned:
            self._looked = now
            for rank in self._ranks.values():
                rank.stack = None
            return "look"
        return None

    def _peek(self, now: float) -> Step | None:
        """Look what an idle rank does while others compute; not too often."""
        idle = any(rank.activity.idle >= self._idle_limit for rank in self._ranks.values())
        recent = self._peeked is not None and now - self._peeked < self._idle_limit
        if not idle or recent:
            return None
        self._peeked = now
        return "look"

    def _say(self, now: float, looked: float) -> Step | None:
        """Warn first, then end, when the ranks have shown their stacks."""
        # A stopped process answers nothing.
        known = self._ranks.values()
        answered = all(rank.stack is not None or rank.activity.frozen for rank in known)
        if not answered and now - looked < _ANSWER_SECONDS:
            return None
        self._looked = None
        if self._warned:
            return "end" if self._is_over(now) else None
        self._warned = True
        return "warn"

    def _is_over(self, now: float) -> bool:
        return self._timeout is not None and self.seconds(now) >= self._timeout

    def _waited(self) -> float | None:
        """For how long the ranks have waited at least, where there is reason to look closer."""
        if self._stalls or any(rank.activity.frozen for rank in self._ranks.values()):
            # They have waited at least that long, and as long as those that do have been idle.
            missing = {rank for stall, _ in self._stalls.values() for rank in stall.missing}
            waiting = [known for rank, known in self._ranks.items() if rank not in missing]
            return max(self._check, *(known.activity.idle for known in waiting), 0.0)
        idle = min((rank.activity.idle for rank in self._ranks.values()), default=0.0)
        if idle >= self._idle_limit:
            return idle
        return max((self._ranks[rank].activity.idle for rank in self._waiting()), default=None)

    def _waiting(self) -> list[int]:
        """The ranks that wait in a collective, as their stacks tell."""
        return [rank for rank, known in self._ranks.items() if known.waits]

    def seconds(self, now: float) -> float:
        """For how long there has been no progress."""
        return 0.0 if self._since is None else now - self._since

    def describe(self, size: int) -> str:
        """Who waits for whom, in a line or a few."""
        lines = []
        groups: dict[tuple[int, ...], list[str]] = {}
        for stall, _ in self._stalls.values():
            groups.setdefault(stall.missing, []).append(stall.tensor)
        for missing, tensors in groups.items():
            waiting = [rank for rank in range(size) if rank not in missing]
            more = len(tensors) - _SHOWN_TENSORS
            named = ", ".join(tensors[:_SHOWN_TENSORS]) + (f" and {more} more" if more > 0 else "")
            verb = "waits" if len(waiting) == 1 else "wait"
            lines.append(f"{ranks_text(waiting)} {verb} in {named} for {ranks_text(missing)}")
        frozen = [rank for rank, known in self._ranks.items() if known.activity.frozen]
        if frozen:
            verb = "is" if len(frozen) == 1 else "are"
            lines.append(f"{ranks_text(frozen)} {verb} stopped (SIGSTOP, or a debugger)")
        waiting = self._waiting()
        others = [rank for rank in self._ranks if rank not in waiting]
        if not lines and waiting and others:
            verb = "waits" if len(waiting) == 1 else "wait"
            lines.append(f"{ranks_text(waiting)} {verb} in a collective for {ranks_text(others)}")
        if not lines:
            lines.append("no rank computes or prints")
        gone = [rank for rank in range(size) if rank not in self._ranks]
        if gone:
            lines.append(f"{ranks_text(gone)} returned from main before")
        return "; ".join(lines)

    def advice(self) -> str:
        """What usually is the cause."""
        if any(rank.activity.frozen for rank in self._ranks.values()):
            return "SIGCONT lets a stopped process go on."
        if not self._stalls and not self._waiting():
            return "The stacks below say where it waits: a lock, a queue, a file or a connection."
        return (
            "All ranks have to call the same collectives, as often and in the same order: unequal "
            "numbers of batches, an early return, and a collective under `if hvd.rank() == 0` are "
            "the usual causes."
        )

    def places(self) -> str:
        """Where each rank is, a line for those at the same place."""
        groups: dict[str, list[int]] = {}
        for rank, known in sorted(self._ranks.items()):
            groups.setdefault(stacks.place(known.stack or ""), []).append(rank)
        return "\n".join(f"{ranks_text(ranks)}: {where}" for where, ranks in groups.items())

    def stacks(self) -> str:
        """All ranks' stacks, as they were at the last look."""
        return stacks.show({rank: known.stack or "" for rank, known in self._ranks.items()})
