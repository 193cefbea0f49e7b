"""Detects hangs, and describes which ranks wait for which. Pure: the caller passes the time.

A hang is suspected when Horovod's stall inspector reports a tensor that some ranks wait for, when
all ranks are idle, when one is stopped, or when an idle rank is inside a collective (native code
that holds the interpreter lock can stop Horovod's own thread, and with it the stall inspector). The
run hangs if that lasts ``timeout`` seconds during which no rank prints or reports anything. CPU use
is not progress: a loop that polls without end uses as much as one that evaluates a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from horovod_runner.common import stacks
from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.text import ranks_text
from horovod_runner.wire.messages import Alive, Stall

_SLACK_SECONDS = 2.0
_SHOWN_TENSORS = 3

Step = Literal["look", "warn", "end"]


@dataclass
class _Rank:
    activity: Alive = field(default_factory=Alive)
    stack: str | None = None  # None: requested and not received, or never requested
    waits: bool = False  # idle inside a collective


def stall_lifetime(check: float) -> float:
    """For how many seconds a reported stall counts; ``check`` is as in :class:`HangWatch`.

    A stall is reported again at every check while a tensor waits. After a gap the tensor belongs to
    another step: slow steps are not a hang.
    """
    return 1.5 * check + _SLACK_SECONDS


class HangWatch:
    """Decides from the ranks' activity whether a run hangs.

    Args:
        timeout: seconds without progress after which the run ends; None for never.
        check: seconds between two inspections; Horovod's stall inspector has the same setting.
    """

    def __init__(self, timeout: float | None, check: float, limits: Limits = DEFAULTS) -> None:
        self._timeout = timeout
        self._check = check
        self._answer = limits.stacks_of_hang
        share = limits.idle_rank if timeout is None else min(limits.idle_rank, timeout / 2)
        self._idle_limit = max(check, share)
        self._ranks: dict[int, _Rank] = {}
        self._stalls: dict[str, tuple[Stall, float]] = {}
        self._of_torch: set[str] = set()  # tensors of these that torch.distributed waits for
        self._since: float | None = None
        self._looked: float | None = None
        self._peeked: float | None = None
        self._warned = False

    def started(self, rank: int) -> None:
        """Record that a rank's worker process runs."""
        self._ranks[rank] = _Rank()

    def ended(self, rank: int) -> None:
        """Record that a rank has ended; others may still wait for it."""
        self._ranks.pop(rank, None)

    def alive(self, rank: int, activity: Alive, now: float) -> None:
        """Record a rank's activity."""
        if rank in self._ranks:
            self._ranks[rank].activity = activity
            self._ranks[rank].waits &= activity.idle >= self._idle_limit
            self._progress(now - activity.quiet)

    def _progress(self, moment: float) -> None:
        if self._since is not None:
            self._since = max(self._since, moment)

    def stalled(self, stalls: Iterable[Stall], now: float) -> None:
        """Record what Horovod's stall inspector reported."""
        for stall in stalls:
            self._stalls[stall.tensor] = (stall, now)

    def stalled_in_torch(self, stalls: Iterable[Stall], now: float) -> None:
        """Record all stalls of torch.distributed that are known; earlier ones are over."""
        for name in self._of_torch:
            self._stalls.pop(name, None)
        known = list(stalls)
        self._of_torch = {stall.tensor for stall in known}
        self.stalled(known, now)

    def shown(self, rank: int, text: str) -> None:
        """Record a rank's Python stacks."""
        if rank in self._ranks:
            known = self._ranks[rank]
            known.stack = text
            known.waits = known.activity.idle >= self._idle_limit and stacks.in_collective(text)

    def step(self, now: float) -> Step | None:
        """The next action, if one is due: request all stacks, warn, or end the run."""
        recent = now - stall_lifetime(self._check)
        self._stalls = {name: one for name, one in self._stalls.items() if one[1] > recent}
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
        """Request stacks where a rank is idle while others compute; not too often."""
        idle = any(rank.activity.idle >= self._idle_limit for rank in self._ranks.values())
        just_did = self._peeked is not None and now - self._peeked < self._idle_limit
        if not idle or just_did:
            return None
        self._peeked = now
        return "look"

    def _say(self, now: float, looked: float) -> Step | None:
        """Warn the first time, end the run the second time, once the stacks have arrived."""
        # A stopped process does not answer.
        known = self._ranks.values()
        answered = all(rank.stack is not None or rank.activity.frozen for rank in known)
        if not answered and now - looked < self._answer:
            return None
        self._looked = None
        if self._warned:
            return "end" if self._is_over(now) else None
        self._warned = True
        return "warn"

    def _is_over(self, now: float) -> bool:
        return self._timeout is not None and self.seconds(now) >= self._timeout

    def _waited(self) -> float | None:
        """A lower bound on how long ranks have waited, in seconds; None without a suspicion."""
        if self._stalls or any(rank.activity.frozen for rank in self._ranks.values()):
            # At least the check interval, or the longest idle time of a waiting rank.
            missing = {rank for stall, _ in self._stalls.values() for rank in stall.missing}
            waiting = [known for rank, known in self._ranks.items() if rank not in missing]
            return max(self._check, *(known.activity.idle for known in waiting), 0.0)
        idle = min((rank.activity.idle for rank in self._ranks.values()), default=0.0)
        if idle >= self._idle_limit:
            return idle
        return max((self._ranks[rank].activity.idle for rank in self._waiting()), default=None)

    def _waiting(self) -> list[int]:
        return [rank for rank, known in self._ranks.items() if known.waits]

    def seconds(self, now: float) -> float:
        """Seconds since the last progress."""
        return 0.0 if self._since is None else now - self._since

    def describe(self, size: int) -> str:
        """Which ranks wait for which, in words."""
        lines = []
        groups: dict[tuple[int, ...], list[str]] = {}
        for stall, _ in self._stalls.values():
            groups.setdefault(stall.missing, []).append(stall.tensor)
        for missing, tensors in groups.items():
            waiting = [rank for rank in range(size) if rank not in missing]
            more = len(tensors) - _SHOWN_TENSORS
            named = ", ".join(tensors[:_SHOWN_TENSORS]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"{_wait_text(waiting)} in {named} for {ranks_text(missing)}")
        frozen = [rank for rank, known in self._ranks.items() if known.activity.frozen]
        if frozen:
            verb = "is" if len(frozen) == 1 else "are"
            lines.append(f"{ranks_text(frozen)} {verb} stopped (SIGSTOP, or a debugger)")
        waiting = self._waiting()
        others = [rank for rank in self._ranks if rank not in waiting]
        if not lines and waiting and others:
            lines.append(f"{_wait_text(waiting)} in a collective for {ranks_text(others)}")
        if not lines:
            lines.append("no rank computes or prints anything")
        gone = [rank for rank in range(size) if rank not in self._ranks]
        if gone:
            lines.append(f"{ranks_text(gone)} already returned from main")
        return "; ".join(lines)

    def advice(self) -> str:
        """The usual cause, and what to do."""
        if any(rank.activity.frozen for rank in self._ranks.values()):
            return "Send SIGCONT to a stopped process to resume it."
        if not self._stalls and not self._waiting():
            return "The stacks below show what each rank waits for: a lock, a queue, a file."
        return (
            "All ranks must call the same collectives the same number of times, in the same order. "
            "Usual causes: unequal numbers of batches, an early return, a collective under "
            "`if hvd.rank() == 0`."
        )

    def places(self) -> str:
        """Where each rank is; ranks at the same place share a line, of at most nine."""
        groups: dict[str, list[int]] = {}
        for rank, known in sorted(self._ranks.items()):
            groups.setdefault(stacks.place(known.stack or ""), []).append(rank)
        shown, rest = stacks.fold(groups)
        lines = [f"{ranks_text(ranks)}: {where}" for where, ranks in shown.items()]
        return "\n".join([*lines, *([f"{ranks_text(rest)}: elsewhere"] if rest else [])])

    def stacks(self) -> str:
        """All ranks' stacks at the last inspection."""
        return stacks.show({rank: known.stack or "" for rank, known in self._ranks.items()})


def _wait_text(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
