"""Ticks of axes, and numbers with their units."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS: Final = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(_MINUTE * count for count in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * count for count in (1, 2, 3, 6, 12)),
)
_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Tick(NamedTuple):
    """A mark at an axis: where, and what is written there."""

    value: float
    label: str


def number_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[Tick]:
    """Return ticks at round numbers between two numbers.

    Args:
        low: the lower end.
        high: the upper end.
        most: how many there may be.
        whole: whether only whole numbers make sense.
    """
    if not high > low:
        return [Tick(low, number(low))]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    if whole:
        step = max(1.0, step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [Tick(n * step, _plain(n * step, decimals)) for n in range(first, last + 1)]


def _plain(value: float, decimals: int) -> str:
    small = decimals > 5 or abs(value) >= 1e7
    return f"{value:.3g}" if small and value else f"{value:,.{decimals}f}"


def time_ticks(low: float, high: float, most: int = 5) -> list[Tick]:
    """Return ticks at round times, in seconds since the beginning; see :func:`time_unit`."""
    rough = (high - low) / most
    step = next((step for step in _TIME_STEPS if step >= rough), 0.0)
    step = step or _DAY * max(1, math.ceil(rough / _DAY))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [Tick(n * step, _moment(n * step, high)) for n in range(first, last + 1)]


def time_unit(high: float) -> str:
    """The unit in which ticks up to a time are written."""
    return "s" if high < _MINUTE else "min:s" if high < _HOUR else "h:min" if high < _DAY else "d"


def _moment(seconds: float, high: float) -> str:
    unit, whole = time_unit(high), round(seconds)
    if unit == "s":
        return f"{seconds:.3g}"
    if unit == "d":
        return f"{seconds / _DAY:.3g}"
    small = whole if unit == "min:s" else whole // _MINUTE
    return f"{small // 60}:{small % 60:02}"


def number(value: float) -> str:
    """Format a number with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e4:
        return f"{value:.4g}"
    whole = value == round(value) and abs(value) < 1e9
    return f"{value:,.0f}" if whole or 1e4 <= abs(value) < 1e7 else f"{value:.3e}"


def duration(seconds: float) -> str:
    """Format a length of time: "4.2 ms", "3.5 s", "2 min 5 s", "1 h 3 min", "2 d 4 h"."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        milliseconds = seconds * 1e3
        if milliseconds < 1:
            return "0 ms" if milliseconds < 0.01 else f"{milliseconds:.2g} ms"
        return f"{milliseconds:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    if seconds < _HOUR:
        return _two(round(seconds), _MINUTE, "min", "s")
    if seconds < _DAY:
        return _two(round(seconds / _MINUTE), 60, "h", "min")
    return _two(round(seconds / _HOUR), 24, "d", "h")


def _two(count: int, many: int, large: str, small: str) -> str:
    rest = f" {count % many} {small}" if count % many else ""
    return f"{count // many} {large}{rest}"


def size(count: float) -> str:
    """Format a number of bytes: "12.3 MB"."""
    factor, prefix = scale([count])
    return f"{count / factor:.3g} {prefix}B"


def scale(values: Sequence[float]) -> tuple[float, str]:
    """Return the power of ten that makes the largest value short, and its prefix: (1e6, "M")."""
    largest = max((abs(value) for value in values), default=0.0)
    return next((pair for pair in _PREFIXES if largest >= pair[0]), (1.0, ""))


def percent(share: float) -> str:
    """Format a share: "3.4%", "41%"."""
    return f"{share:.1%}" if 0 < share < 0.095 else f"{share:.0%}"


def clock_time(seconds: float) -> str:
    """Format seconds since the epoch as local time, with its distance from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC%z", time.localtime(seconds)).removesuffix("+0000")
