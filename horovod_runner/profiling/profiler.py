"""Summarizes once a second what a rank has measured, and sends it to the driver."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from horovod_runner.profiling.clock import clock
from horovod_runner.profiling.collectives import Collective, Collectives
from horovod_runner.profiling.sampler import Sampler
from horovod_runner.profiling.steps import OptimizerSteps
from horovod_runner.wire.measurements import Lines, Profile

_LOOK_SECONDS: Final = 0.02
_WINDOW_SECONDS: Final = 1.0
_LINES_SECONDS: Final = 30.0  # between two messages with the lines seen so far
_ARRIVALS: Final = 100  # collectives of a window whose waits are sent one by one
_MOST_STACKS: Final = 200


class Profiler:
    """Measures from its start to :meth:`finish`, in a thread of its own.

    Args:
        rank: this rank's number.
        send: sends a summary, or drops it where there is no room; must not wait.
        send_lines: sends the lines that the main thread was seen at; may wait.
    """

    def __init__(
        self, rank: int, send: Callable[[Profile], None], send_lines: Callable[[Lines], None]
    ) -> None:
        self._rank = rank
        self._send = send
        self._send_lines = send_lines
        self._sampler = Sampler()
        self._steps = OptimizerSteps()
        self._collectives = Collectives()
        self._names: Counter[str] = Counter()
        self._unsent: list[Collective] = []
        self._before = _Counters()
        self._late = 0.0
        self._has_news = False
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="horovod_runner-profile", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        now = time.monotonic()
        window, lines = now + _WINDOW_SECONDS, now + _LINES_SECONDS
        due = now + _LOOK_SECONDS
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self._late += now - due
            due = max(due + _LOOK_SECONDS, now)  # not several looks at once after a pause
            self._sampler.look()
            if now >= window:
                self._steps.watch()
                self._summarize()
                window = now + _WINDOW_SECONDS
            if now >= lines and self._has_news:
                self._send_lines(self._lines())
                self._has_news = False
                lines = now + _LINES_SECONDS

    def finish(self) -> None:
        """Stop measuring, and send the rest."""
        self._ended.set()
        self._thread.join()
        self._summarize(final=True)
        if self._sampler.looks:
            self._send_lines(self._lines())

    def _summarize(self, *, final: bool = False) -> None:
        taken = self._collectives.take()
        self._names.update(each.name for each in taken)
        collectives = self._unsent + taken
        now = _Counters.now(self._steps.count, self._collectives, self._names, self._late)
        before = self._before
        if not any(now.steps.values()):  # still importing and connecting
            self._before, self._unsent = now, []
            return
        if not final and (now.steps, now.spent) == (before.steps, before.spent):
            self._unsent = collectives
            return  # a rank that hangs must look like one, and not report that it does
        self._before, self._has_news, self._unsent = now, True, []
        spent = {name: s - before.spent.get(name, 0.0) for name, s in now.spent.items()}
        behind = {name: s - before.behind.get(name, 0.0) for name, s in now.behind.items()}
        steps = {name: n - before.steps.get(name, 0) for name, n in now.steps.items()}
        self._send(
            Profile(
                self._rank,
                now.wall,
                now.time - before.time,
                {name: n for name, n in steps.items() if n},
                {name: s for name, s in spent.items() if s > 0},
                {name: s for name, s in behind.items() if s > 0},
                sum(each.bytes for each in collectives),
                len(collectives),
                sum(each.waited for each in collectives),
                sum(each.moved or 0.0 for each in collectives),
                arrivals(collectives, now.time),
                now.cpu - before.cpu,
                now.main_cpu - before.main_cpu,
                now.starved - before.starved,
                now.late - before.late,
            )
        )

    def _lines(self) -> Lines:
        stacks = Counter(self._sampler.stacks()).most_common(_MOST_STACKS)
        numbers: dict[tuple[str, str, int], int] = {}
        coded = [[numbers.setdefault(call, len(numbers)) for call in stack] for stack, _ in stacks]
        calls = [f"{file}\0{function}\0{line}" for file, function, line in numbers]
        return Lines(self._rank, self._sampler.looks, calls, coded, [n for _, n in stacks])


class _Counters:
    """What has been counted up to a moment."""

    def __init__(self) -> None:
        # Read together: a pause between them would shift this rank's clock against other hosts'.
        self.time, self.wall = time.monotonic(), time.time()
        self.steps: dict[str, int] = {}
        self.spent: dict[str, float] = {}
        self.behind: dict[str, float] = {}
        self.cpu = 0.0
        self.main_cpu = 0.0
        self.starved = 0.0
        self.late = 0.0

    @classmethod
    def now(
        cls, optimizer_steps: int, collectives: Collectives, names: Counter[str], late: float
    ) -> _Counters:
        """The counts at this moment."""
        counters = cls()
        counters.steps = {
            "optimizer": optimizer_steps,
            "batches": clock.batches,
            "reports": clock.reports,
            "reductions": max(names.values(), default=0),
        }
        totals = collectives.totals
        counters.spent = {
            **clock.seconds,
            "waiting": totals.waiting,
            "moving": totals.moving,
        }
        counters.behind = dict(clock.behind)
        times = os.times()
        counters.cpu = times.user + times.system
        counters.main_cpu, counters.starved = _main_thread()
        counters.late = late
        return counters


def _main_thread() -> tuple[float, float]:
    """Seconds in which the main thread has run, and in which it could have but had no core.

    Linux counts both; see its documentation of schedstats.
    """
    with suppress(OSError, ValueError):
        pid = os.getpid()
        with open(f"/proc/self/task/{pid}/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
        return int(ran) * 1e-9, int(waited) * 1e-9
    return 0.0, 0.0


def arrivals(collectives: Iterable[Collective], now: float) -> list[tuple[int, int, int]]:
    """Some collectives of all ranks: (number, microseconds waited, microseconds since its start).

    Other ranks choose the same ones: the numbers that are divisible by a power of two. The power
    depends on how many collectives there are, so one that is chosen at a higher rate is chosen at a
    lower one, too.
    """
    of_all = [each for each in collectives if each.process_set == 0]
    stride = 1
    while len(of_all) > _ARRIVALS * stride:
        stride *= 2
    return [
        (each.number, round(each.waited * 1e6), round((now - each.started) * 1e6))
        for each in of_all
        if each.number % stride == 0
    ]
