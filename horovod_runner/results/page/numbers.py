"""Formats numbers with their units."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Format a number with four significant digits, or all before the point: "0.1235", "12,346"."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format a length of time: "4.2 ms", "3.5 s", "2 min 5 s", "1 h 3 min", "2 d 4 h"."""
    if seconds < 1e-5:
        return "0 ms"
    if seconds < 1:
        return f"{seconds * 1e3:.{2 if seconds < 1e-3 else 3}g} ms"
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


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which times up to this one are short numbers: (60, "min")."""
    units = ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"))
    return next(((float(size), name) for size, name in units if seconds >= 2 * size), (1.0, "s"))


def size(count: float) -> str:
    """Format a number of bytes: "12.3 MB"."""
    factor, prefix = scale([count])
    return f"{count / factor:.3g} {prefix}B"


def scale(values: Iterable[float]) -> tuple[float, str]:
    """Return the power of ten that makes the largest value short, and its prefix: (1e6, "M")."""
    largest = max((abs(value) for value in values), default=0.0)
    return next((pair for pair in _PREFIXES if largest >= pair[0]), (1.0, ""))


def percent(share: float) -> str:
    """Format a share: "3.4%", "41%"."""
    return f"{share:.1%}" if 0 < share < 0.095 else f"{share:.0%}"


def clock_time(seconds: float) -> str:
    """Format seconds since the epoch as local time, with its distance from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC%z", time.localtime(seconds)).removesuffix("+0000")
