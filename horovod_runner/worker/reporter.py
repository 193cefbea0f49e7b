"""Sends a rank's reports: numbers from the training loop to the task beside the worker.

A report is one write to a pipe, and never waits. If the pipe is full, because the driver takes less
than is reported, the report is dropped and counted. The latest value of each metric is held back,
and sent with the next report that finds room, at the latest when ``main`` ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from horovod_runner.common.clocks import process_clock
from horovod_runner.common.numbers import check_report, plain_int
from horovod_runner.wire import events, measurements, messages
from horovod_runner.wire.framing import frame

# A write of at most this size to a pipe is atomic (POSIX: PIPE_BUF).
_ATOMIC_BYTES = 4096
_MOST_HELD = 1 << 12  # names of metrics; the driver's table has no column for more
# A metric's latest value, and its report's step, epoch and time.
_Held = tuple[float | int, int | None, int | None, float]


class Reporter:
    """The worker's end of the pipe of reports.

    Args:
        descriptor: the pipe's; becomes non-blocking.
        wanted: whether this rank's reports are recorded; otherwise they are only checked.
    """

    def __init__(self, rank: int, descriptor: int, wanted: bool) -> None:
        self._rank = rank
        self._descriptor = descriptor
        self._wanted = wanted
        self._held: dict[str, _Held] = {}
        self._left_out = 0
        self._total_steps: int | None = None  # goes with the next message that finds room
        self._lock = threading.Lock()  # for what is held back
        os.set_blocking(descriptor, False)
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread may have held the lock; and what is held back is the parent's to send.
        self._lock = threading.Lock()
        self._held, self._left_out, self._total_steps = {}, 0, None

    def report(
        self, metrics: Mapping[str, Any], step: Any, epoch: Any, total_steps: Any = None
    ) -> None:
        """Send a report; the arguments of :func:`horovod_runner.report`.

        Raises:
            TypeError: a metric is not a number, or a step or an epoch is not a whole number.
            ValueError: as :func:`check_report`; or a metric's name is too long for one message.
        """
        numbers, step, epoch = check_report(metrics, step, epoch)
        if total_steps is not None:
            self._total_steps = plain_int("total_steps", total_steps)
        if not self._wanted:
            return
        now = process_clock()
        if self._held:
            self._send_held()
        if self._held or not self._send(numbers, step, epoch, now):
            self._hold({name: (value, step, epoch, now) for name, value in numbers.items()})

    def send_profile(self, message: measurements.Profile) -> None:
        """Send where the rank's time went, or drop it if the pipe is full."""
        data = frame(messages.encode(message))
        if len(data) <= _ATOMIC_BYTES:
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._descriptor, data)

    def finish(self) -> None:
        """Send what is held back, however long it takes."""
        if self._held:
            with suppress(OSError):  # nobody reads the pipe any more
                os.set_blocking(self._descriptor, True)
                self._send_held()

    def _hold(self, latest: dict[str, _Held]) -> None:
        with self._lock:
            self._left_out += not latest  # a report without metrics leaves nothing to send later
            known = [*self._held.values(), *latest.values()]
            before = {held[1:] for held in known}
            for name, value in latest.items():
                if name in self._held or len(self._held) < _MOST_HELD:
                    self._held[name] = value
            # Reports are dropped if all of their metrics were replaced by later ones, or too many.
            self._left_out += len(before - {held[1:] for held in self._held.values()})

    def _send_held(self) -> None:
        with self._lock:
            groups: dict[tuple[Any, ...], dict[str, float | int]] = {}
            for name, (value, *moment) in self._held.items():
                groups.setdefault(tuple(moment), {})[name] = value
            for (step, epoch, reported_at), numbers in groups.items():
                if not self._send(numbers, step, epoch, reported_at, self._left_out):
                    return
                self._left_out = 0
                for name in numbers:
                    del self._held[name]

    def _send(
        self,
        numbers: Mapping[str, float | int],
        step: int | None,
        epoch: int | None,
        reported_at: float,
        left_out: int = 0,
    ) -> bool:
        """Write a report to the pipe, in several messages if it is long; False if it is full."""
        total = self._total_steps
        message = events.Report(self._rank, numbers, step, epoch, reported_at, left_out, total)
        data = frame(messages.encode(message))
        if len(data) > _ATOMIC_BYTES:
            if len(numbers) <= 1:
                name = next(iter(numbers), "")
                raise ValueError(
                    f"a metric's name of {len(name)} characters is too long, a message has room "
                    f"for {_ATOMIC_BYTES} bytes: shorten {name[:80]}..."
                )
            items, half = list(numbers.items()), len(numbers) // 2
            first, rest = dict(items[:half]), dict(items[half:])
            return self._send(first, step, epoch, reported_at, left_out) and self._send(
                rest, step, epoch, reported_at
            )
        try:
            os.write(self._descriptor, data)
        except BlockingIOError:
            return False
        if total is not None:
            self._total_steps = None
        return True
