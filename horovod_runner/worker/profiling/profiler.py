"""Summarizes once a second what a rank has measured, and sends it to the driver."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, Final

from msgspec.structs import replace

from horovod_runner.common.clocks import process_clock, scheduled
from horovod_runner.common.threads import start_thread
from horovod_runner.wire.measurements import UNKNOWN, Lines, Profile, Thread, Waits
from horovod_runner.worker.profiling.clock import clock
from horovod_runner.worker.profiling.collectives import TORCH_SET, Collective, CollectiveLog, chosen
from horovod_runner.worker.profiling.flight_recorder import FlightRecorder
from horovod_runner.worker.profiling.loader import loaders
from horovod_runner.worker.profiling.sampler import LOOK_SECONDS, Pace, Sampler, Stack
from horovod_runner.worker.profiling.steps import optimizer_steps

_WINDOW_SECONDS: Final = 1.0
_LATE_SECONDS: Final = 0.002  # from which it is of interest who has the interpreter lock
_LINES_SECONDS: Final = 30.0  # between two messages with the lines seen so far
# Collectives of a window whose waits are sent one by one: of each rank, and of all together.
_ARRIVALS, _ALL_ARRIVALS, _FEWEST_ARRIVALS = 100, 4000, 4
_MOST_STACKS: Final = 200
_OF_A_MOMENT: Final = ("rank", "time", "threads", "arrivals")  # attributes of Profile


class Profiler:
    """Measures from its start to :meth:`finish`, in a thread of its own.

    Args:
        send: sends a summary, or drops it where there is no room; must not wait.
        send_news: sends the lines that the main thread was seen at, and the collectives that it
            waits in; may wait.
        outermost: the calls of this function, and those around it, are no lines of interest.
        stall_seconds: how long a collective of torch.distributed lasts until the driver is told.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[Profile], None],
        send_news: Callable[[Lines | Waits], None],
        outermost: CodeType | None = None,
        *,
        stall_seconds: float = 60.0,
        flight_recorder: FlightRecorder | None = None,
    ) -> None:
        self._rank = rank
        self._most_arrivals = max(_FEWEST_ARRIVALS, min(_ARRIVALS, _ALL_ARRIVALS // size))
        self._send = send
        self._send_news = send_news
        self._stall_seconds = stall_seconds
        self._waits_due = 0.0
        self._sampler = Sampler(outermost)
        self._look_seconds = LOOK_SECONDS  # between two looks of this summary
        self._collectives = CollectiveLog()
        self._flight_recorder = flight_recorder or FlightRecorder()
        self._unsent: list[Collective] = []
        self._late = 0.0
        self._thread = threading.Thread(
            target=self._run, name="horovod_runner-profile", daemon=True
        )
        self._before = self._count()
        self._has_news = False
        self._problem = ""
        # Held until the end. A lock is quicker to wait for than an Event.
        self._running = threading.Lock()
        self._running.acquire()
        loaders.begin()
        self._thread.start()

    def _run(self) -> None:
        try:
            self._measure()
        except Exception as error:  # whatever a future version of a framework does
            self._problem = f"{type(error).__name__}: {error}"

    def _measure(self) -> None:
        pace = Pace()
        self._look_seconds = pace.seconds
        now = time.monotonic()
        window, lines = now + _WINDOW_SECONDS, now + _LINES_SECONDS
        due = now + pace.seconds
        while not self._running.acquire(timeout=max(0.0, due - time.monotonic())):
            now = time.monotonic()
            late = now - due
            self._late += late
            if late > _LATE_SECONDS:
                self._sampler.look_at_others()
            due = max(due + pace.seconds, now)  # not several looks at once after a pause
            self._sampler.look()
            if now >= window:
                self._summarize()
                pace.adjust()
                self._look_seconds = pace.seconds
                window = now + _WINDOW_SECONDS
            if now >= lines and self._has_news:
                self._send_all_lines()
                self._has_news = False
                lines = now + _LINES_SECONDS

    def finish(self) -> str:
        """Stop measuring, and send the rest; returns why it has ended earlier, or ""."""
        self._running.release()
        self._thread.join()
        if not self._problem:
            self._summarize(final=True)
            self._send_all_lines()
        return self._problem

    def _summarize(self, *, final: bool = False) -> None:
        collectives = self._unsent + self._take()
        now, before = self._count(), self._before
        stands_still = (now.steps, now.spent) == (before.steps, before.spent) and not final
        if not final:  # also if it reports: another thread may do that
            self._send_waits(now.seconds)
        is_training = any(now.steps.values())  # otherwise it is still importing and connecting
        if stands_still and is_training:
            self._unsent = collectives
            return  # a rank that hangs must look like one, and not report that it does
        self._before, self._unsent = now, []
        blocked = self._sampler.take_blocked()
        if not is_training:
            return
        self._has_news = True
        summary = _since(before, now)
        if collectives and collectives[-1].started is None:
            summary.spent["blocked"] = _blocked(summary, blocked)
        late = summary.late * self._look_seconds / LOOK_SECONDS
        self._send(
            replace(
                summary,
                steps={name: n for name, n in summary.steps.items() if now.steps[name]},
                spent={name: s for name, s in summary.spent.items() if s > 0},
                stages={name: s for name, s in summary.stages.items() if s > 0},
                arrivals=arrivals(collectives, now.seconds),
                late=min(late, summary.seconds),
            )
        )
        if not final and not any(before.steps.values()):
            self._sampler.forget()  # the lines of imports and of the first steps

    def _send_waits(self, now: float) -> None:
        """Name the collectives of torch.distributed in which this rank waits for others."""
        waits = self._flight_recorder.waits(self._stall_seconds)
        if waits and now >= self._waits_due:
            self._waits_due = now + self._stall_seconds
            self._send_news(Waits(self._rank, waits))

    def _take(self) -> list[Collective]:
        """Some collectives since the last call: of Horovod, else of torch.distributed."""
        taken = self._collectives.take(self._most_arrivals)
        of_torch = self._flight_recorder.take()
        if self._collectives.totals.collectives:
            return taken
        return chosen(of_torch, self._most_arrivals)

    def _count(self) -> Profile:
        """What there was from the start to this moment, which ``seconds`` is on monotonic clocks.

        Its ``late`` is not scaled.
        """
        # Read together: a pause between them would shift this rank's clock against other hosts'.
        monotonic, wall = time.monotonic(), process_clock()
        totals, of_torch = self._collectives.totals, self._flight_recorder
        times = os.times()
        main_cpu, starved = scheduled(os.getpid()) or (0.0, 0.0)
        _, no_core = scheduled(self._thread.native_id or 0) or (0.0, 0.0)
        return Profile(
            self._rank,
            wall,
            monotonic,
            steps={
                "optimizer": optimizer_steps.count,
                "batches": max(clock.batches, loaders.batches),
                "reports": clock.reports,
                "reductions": totals.most,
            },
            spent={**clock.seconds, "waiting": totals.waiting, "moving": totals.moving},
            stages=dict(clock.stages),
            cells=max(clock.cells, loaders.cells),
            threads=_torch_threads(),
            bytes=totals.bytes + of_torch.bytes,
            collectives=totals.collectives + of_torch.count,
            waited=totals.waited,
            moved=totals.moved,
            cpu=times.user + times.system,
            main_cpu=main_cpu,
            starved=starved,
            late=self._late - no_core,
        )

    def _send_all_lines(self) -> None:
        sampler = self._sampler
        loaders.read()
        seen: list[tuple[Thread, int, Mapping[Stack, int]]] = [
            ("main", sampler.total, sampler.stacks()),
            ("others", sampler.late_looks, sampler.stacks_of_others()),
            ("loader", loaders.total, loaders.stacks),
        ]
        for thread, total, stacks in seen:
            if total:
                self._send_news(_lines(self._rank, thread, total, stacks))


def _lines(rank: int, thread: Thread, total: int, seen: Mapping[Stack, int]) -> Lines:
    stacks = Counter(seen).most_common(_MOST_STACKS)
    numbers: dict[tuple[str, str, int], int] = {}
    coded = [[numbers.setdefault(call, len(numbers)) for call in stack] for stack, _ in stacks]
    calls = [f"{file}\0{function}\0{line}" for file, function, line in numbers]
    return Lines(rank, total, calls, coded, [n for _, n in stacks], thread)


def _since(before: Profile, now: Profile) -> Profile:
    changes: dict[str, Any] = {}
    for name in Profile.__struct_fields__:
        first, last = getattr(before, name), getattr(now, name)
        if isinstance(last, dict):
            changes[name] = {key: value - first.get(key, 0) for key, value in last.items()}
        elif name not in _OF_A_MOMENT:
            changes[name] = last - first
    return replace(now, **changes)


def _blocked(summary: Profile, share: float) -> float:
    """Seconds in which the main thread did nothing, in calls of torch that wait for collectives.

    ``share`` is the share of the time in which it was seen in such calls.
    """
    known = sum(summary.spent.values())  # in which it waited for something else
    idle = summary.seconds - known - summary.main_cpu - summary.starved
    return max(0.0, min(idle, summary.seconds * share))


def _torch_threads() -> int:
    """How many threads torch computes with.

    A thread that has asked once gets the same answer for ever, also if ``main`` sets another number
    later (at::get_num_threads, lazy_init_num_threads). So a new thread asks each time.
    """
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if count is None:
        return 0
    found: list[int] = []
    start_thread("torch-threads", lambda: found.append(int(count()))).join()
    return found[0]


def arrivals(collectives: Iterable[Collective], now: float) -> list[tuple[int, int, int]]:
    """Collectives of all ranks, see :attr:`Profile.arrivals`; ``now`` by the monotonic clock."""
    sets = (0, TORCH_SET)
    return [_arrival(each, now) for each in collectives if each.process_set in sets]


def _arrival(each: Collective, now: float) -> tuple[int, int, int]:
    number = -each.number if each.process_set == TORCH_SET else each.number
    if each.started is None:
        return number, UNKNOWN, round((now - each.queued) * 1e6)
    waited = round((each.started - each.queued) * 1e6)
    return number, waited, round((now - each.started) * 1e6)
