"""Asks the ranks for their Python stacks, warns of a hang, and makes the HangError; see `hangs`.

Also shows that memory is nearly used up, once for all ranks of a host, and that the ranks' output
is not shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from horovod_runner.common import stacks
from horovod_runner.driver.checks import Checks
from horovod_runner.errors import HangError
from horovod_runner.results.memory import warning
from horovod_runner.wire import messages
from horovod_runner.wire.job import Job
from horovod_runner.wire.measurements import MemoryShort, Waits

_UNSHOWN: Final = (
    "what the ranks print is not shown here, because driver_log_verbosity is "
    '"log_callback_only", the default of Databricks\' HorovodRunner. '
    'driver_log_verbosity="all" shows it; log_to_driver(text) shows a line in any case'
)


class Watchdog:
    """Watches the ranks of one attempt for hangs.

    Args:
        notice: shows a text to the user: warnings, and stacks that were requested.
    """

    def __init__(
        self, job: Job, checks: Checks, notice: Callable[[str], None], ask: Callable[[], None]
    ) -> None:
        self._job = job
        self._timeout = job.options.debug_config.hang_timeout
        self._notice = notice
        self._ask = ask
        self._limits = job.limits
        self._hang = checks.hang
        self._waits = checks.waits
        self._running: set[int] = set()
        self._stacks: dict[int, str] = {}
        self._show_at: float | None = None
        # By host: when to show that its memory is short, and what its ranks have sent.
        self._shortages: dict[str, tuple[float, dict[int, MemoryShort]]] = {}

    def started(self, rank: int) -> None:
        """Record that a rank's worker process runs."""
        self._running.add(rank)
        self._hang.started(rank)

    def ended(self, rank: int) -> None:
        """Record that a rank has ended."""
        self._running.discard(rank)
        self._hang.ended(rank)
        self._waits.ended(rank)

    def handle(self, rank: int, message: messages.FromRank) -> None:
        """Handle an Alive, Stalled, Waits, Stacks, MemoryShort or Unshown message of a rank."""
        now = time.monotonic()
        match message:
            case messages.Alive():
                self._hang.alive(rank, message, now)
            case messages.Stalled():
                self._hang.stalled(message.stalls, now)
            case Waits():
                self._waits.take(rank, message, now)
            case messages.Stacks():
                self._hang.shown(rank, message.text)
                self._stacks[rank] = message.text
            case MemoryShort():
                begun = (now + self._limits.same_warning, dict[int, MemoryShort]())
                self._shortages.setdefault(message.host, begun)[1][rank] = message
            case messages.Unshown():
                if rank == 0 and self._job.attempt == 1:  # once a run
                    self._notice(_UNSHOWN)

    def show_shortages(self, now: float = math.inf) -> None:
        """Show on which hosts memory is short, and by what; if ``now`` is given, what is due."""
        for host, (due, sent) in list(self._shortages.items()):
            if now >= due:
                del self._shortages[host]
                self._notice(warning(host, sent))

    def show_stacks(self) -> None:
        """Request all ranks' stacks, to print them."""
        self._stacks.clear()
        self._show_at = time.monotonic() + self._limits.stacks_shown
        self._ask()

    def tick(self) -> HangError | None:
        """Do what is due; returns the error if the run has to end."""
        now = time.monotonic()
        self.show_shortages(now)
        if self._show_at is not None and (
            self._running <= self._stacks.keys() or now >= self._show_at
        ):
            self._show_at = None
            shown = {rank: self._stacks.get(rank, "") for rank in self._running}
            self._notice(stacks.show(shown) or "no rank is running: there is no stack to show")
        stalls = self._waits.news(now)
        if stalls is not None:
            self._hang.stalled_in_torch(stalls, now)
        match self._hang.step(now):
            case "look":
                self._ask()
            case "warn":
                self._notice(self._warning(now))
            case "end":
                return self._error(now)
        return None

    def _warning(self, now: float) -> str:
        timeout = self._timeout
        outlook = (
            "hang_timeout is None: the run may wait for ever"
            if timeout is None
            else f"the run ends at {timeout:g} s (hang_timeout)"
        )
        return (
            f"no progress for {self._hang.seconds(now):.0f} s: "
            f"{self._hang.describe(self._job.size)}; {outlook}\n{self._hang.places()}"
        )

    def _error(self, now: float) -> HangError:
        return HangError(
            f"the ranks made no progress for {self._hang.seconds(now):.0f} s: "
            f"{self._hang.describe(self._job.size)}. {self._hang.advice()} If this was not a "
            f"hang, raise hang_timeout (it is {self._timeout:g} s).\n\n{self._hang.stacks()}"
        )
