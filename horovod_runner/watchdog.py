"""The driver's eye on hangs: asks the ranks for their stacks, warns, and makes the error.

What is a hang, and who waits for whom, is decided in `hang`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from horovod_runner import messages, stacks
from horovod_runner.errors import HangError
from horovod_runner.hang import HangWatch
from horovod_runner.job import Job
from horovod_runner.sinks import Sink

_ANSWER_SECONDS = 4.0


class Watchdog:
    """Watches over the ranks of one run.

    Args:
        job: the run.
        sink: takes the warnings, and the stacks that were asked for.
        ask: asks all ranks for their stacks.
    """

    def __init__(self, job: Job, sink: Sink, ask: Callable[[], None]) -> None:
        self._job = job
        self._sink = sink
        self._ask = ask
        self._hang = HangWatch(job.hang_timeout, job.stall_seconds)
        self._running: set[int] = set()
        self._stacks: dict[int, str] = {}
        self._show_at: float | None = None

    def started(self, rank: int) -> None:
        """A rank's worker runs."""
        self._running.add(rank)
        self._hang.started(rank)

    def ended(self, rank: int) -> None:
        """A rank has ended."""
        self._running.discard(rank)
        self._hang.ended(rank)

    def handle(self, rank: int, message: messages.FromRank) -> None:
        """Take in what a rank sent."""
        now = time.monotonic()
        match message:
            case messages.Alive():
                self._hang.alive(rank, message, now)
            case messages.Stalled():
                self._hang.stalled(message.stalls, now)
            case messages.Stacks():
                self._hang.shown(rank, message.text)
                self._stacks[rank] = message.text

    def show_stacks(self) -> None:
        """Ask all ranks for their stacks, to print them."""
        self._stacks.clear()
        self._show_at = time.monotonic() + _ANSWER_SECONDS
        self._ask()

    def tick(self) -> HangError | None:
        """Do what is due; returns the error if the run is to end."""
        now = time.monotonic()
        if self._show_at is not None and (
            self._running <= self._stacks.keys() or now >= self._show_at
        ):
            self._show_at = None
            shown = {rank: self._stacks.get(rank, "") for rank in self._running}
            self._sink.notice(stacks.show(shown) or "no rank runs: there is no stack to show")
        match self._hang.step(now):
            case "look":
                self._ask()
            case "warn":
                self._sink.notice(self._warning(now))
            case "end":
                return self._error(now)
        return None

    def _warning(self, now: float) -> str:
        timeout = self._job.hang_timeout
        outlook = (
            "hang_timeout is None: it may wait for ever"
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
            f"{self._hang.describe(self._job.size)}. {self._hang.advice()} If this was no hang, "
            f"raise hang_timeout (it is {self._job.hang_timeout:g} s).\n\n{self._hang.stacks()}"
        )
