"""A rank's reports on their way out: numbers from the training loop to the watching process.

A call writes one message into a pipe and never waits. Where the pipe is full, because the driver
takes less than is reported, the report is left out and counted; the latest value of each metric is
held and follows with the next report for which there is room, at the latest when ``main`` ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from horovod_runner import messages
from horovod_runner.frames import frame

# What the table of reports calls its own columns.
COLUMNS: Final = ("rank", "attempt", "step", "epoch", "time")
_COLUMNS: Final = frozenset(COLUMNS)
# Writes of at most so much to a pipe come whole and unmixed (POSIX: PIPE_BUF).
_ATOMIC_BYTES = 4096
_PLAIN = (float, int)
_LEAST, _MOST = -(2**63), 2**63 - 1
_Held = tuple[float | int, int | None, int | None, float]


class Reporter:
    """The worker's end.

    Args:
        rank: whose it is.
        descriptor: of a pipe.
        wanted: whether this rank's reports are.
    """

    def __init__(self, rank: int, descriptor: int, wanted: bool) -> None:
        self._rank = rank
        self._descriptor = descriptor
        self._wanted = wanted
        self._held: dict[str, _Held] = {}
        self._left_out = 0
        self._lock = threading.Lock()  # of what is held
        os.set_blocking(descriptor, False)
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread may have held the lock; and what is held is the parent's to send.
        self._lock = threading.Lock()
        self._held, self._left_out = {}, 0

    def report(self, metrics: Mapping[str, Any], step: Any, epoch: Any) -> None:
        """Send a report; raises TypeError and ValueError as :func:`checked` does."""
        numbers, step, epoch = checked(metrics, step, epoch)
        if not self._wanted:
            return
        now = time.time()
        if self._held:
            self._send_held()
        if self._held or not self._send(numbers, step, epoch, now):
            self._hold({name: (value, step, epoch, now) for name, value in numbers.items()})

    def finish(self) -> None:
        """Send what is held, however long it takes."""
        if self._held:
            with suppress(OSError):  # nobody reads any more
                os.set_blocking(self._descriptor, True)
                self._send_held()

    def _hold(self, latest: dict[str, _Held]) -> None:
        with self._lock:
            self._left_out += not latest  # of one without metrics nothing could follow
            before = {held[1:] for held in self._held.values()}
            self._held.update(latest)
            # Of these nothing is left: later reports had the same metrics.
            self._left_out += len(before - {held[1:] for held in self._held.values()})

    def _send_held(self) -> None:
        with self._lock:
            groups: dict[tuple[Any, ...], dict[str, float | int]] = {}
            for name, (value, *moment) in self._held.items():
                groups.setdefault(tuple(moment), {})[name] = value
            for (step, epoch, moment_), numbers in groups.items():
                if not self._send(numbers, step, epoch, moment_, self._left_out):
                    return
                self._left_out = 0
                for name in numbers:
                    del self._held[name]

    def _send(
        self,
        numbers: Mapping[str, float | int],
        step: int | None,
        epoch: int | None,
        now: float,
        left_out: int = 0,
    ) -> bool:
        """Whether there was room."""
        message = messages.Report(self._rank, numbers, step, epoch, now, left_out)
        data = frame(messages.encode(message))
        if len(data) > _ATOMIC_BYTES:
            if len(numbers) <= 1:
                name = next(iter(numbers), "")
                told = f"a metric's name of {len(name)} characters is too long"
                raise ValueError(f"{told}: {name[:80]}...")
            items, half = list(numbers.items()), len(numbers) // 2
            first, rest = dict(items[:half]), dict(items[half:])
            return self._send(first, step, epoch, now, left_out) and self._send(
                rest, step, epoch, now
            )
        try:
            os.write(self._descriptor, data)
        except BlockingIOError:
            return False
        return True


def checked(
    metrics: Mapping[str, Any], step: Any, epoch: Any
) -> tuple[Mapping[str, float | int], int | None, int | None]:
    """The arguments of a report as plain numbers.

    Raises:
        TypeError: a metric is no number, or a step or an epoch no whole one.
        ValueError: a metric has the name of a column that every report has.
    """
    # A training loop waits for this: what is right as it is, is only looked at.
    if not _COLUMNS.isdisjoint(metrics):
        refuse_columns(metrics)
    for value in metrics.values():
        if type(value) is not float:
            metrics = _numbers(metrics)
            break
    if step is not None and (type(step) is not int or not _LEAST <= step <= _MOST):
        step = whole("step", step)
    if epoch is not None and (type(epoch) is not int or not _LEAST <= epoch <= _MOST):
        epoch = whole("epoch", epoch)
    return metrics, step, epoch


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for name, value in metrics.items():
        plain = value if type(value) in _PLAIN else number(name, value)
        found[name] = plain if type(plain) is float or _LEAST <= plain <= _MOST else float(plain)
    return found


def refuse_columns(names: Iterable[str]) -> None:
    """Raises ValueError where a metric has the name of a column that every report has."""
    for name in names:
        if name in COLUMNS:
            raise ValueError(
                f"a metric cannot be named {name!r}: each report has {', '.join(COLUMNS)} beside "
                "its metrics. Give it another name."
            )


def named(metrics: Any) -> dict[str, float | int]:
    """The metrics of a checkpoint as plain numbers.

    Raises:
        TypeError: they are no dict of numbers by name.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of numbers, not {type(metrics).__qualname__}")
    for name in metrics:
        if not isinstance(name, str):
            kind = type(name).__qualname__
            raise TypeError(f"a metric's name must be a string, not {kind} ({name!r:.80})")
    return _numbers(metrics)


def number(name: str, value: Any) -> float | int:
    """A metric as a plain number: numbers, and NumPy, torch and TensorFlow scalars.

    Raises:
        TypeError: it is something else.
    """
    found: Any = value
    if not isinstance(value, (int, float)):
        if getattr(value, "shape", None) is None or isinstance(value, type):
            raise _no_number(name, value)
        try:
            # TensorFlow's have no item(), and what is in a graph has no value at all.
            found = value.item() if hasattr(value, "item") else value.numpy().item()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            raise _no_number(name, value) from None
    if isinstance(found, bool) or type(found).__name__ == "bool":
        return int(found)
    if isinstance(found, int):
        return int(found)
    if isinstance(found, float):
        return float(found)
    raise _no_number(name, value)


def _no_number(name: str, value: Any) -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shape = getattr(value, "shape", None)
    shaped = f" of shape {tuple(shape)}" if isinstance(shape, (tuple, list)) else ""
    return TypeError(
        f"the metric {name!r} is a {kind}{shaped}: metrics are numbers, or NumPy, torch and "
        "TensorFlow scalars. Reduce it to one number (its mean, say), or leave it out."
    )


def interval(name: str, value: Any) -> int:
    """After how many batches or epochs a callback does something; 0 is never.

    Raises:
        ValueError: it is no whole number from 0 on.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number from 0 on, not {value!r}")
    return value


def whole(name: str, value: Any) -> int:
    """A step or an epoch as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it has more than 64 bits.
    """
    found = value
    with suppress(TypeError):
        found = number(name, value)
    if isinstance(value, bool) or not isinstance(found, int):
        kind = type(value).__qualname__
        raise TypeError(f"{name} must be a whole number, not {kind} ({value!r:.80})")
    if not _LEAST <= found <= _MOST:
        raise ValueError(f"{name} must be a number of 64 bits, and {found} is not")
    return found
