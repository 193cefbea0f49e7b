"""The events of the Trace Event Format, which Perfetto and Chrome read; times in microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

Event = dict[str, Any]

#: The numbers of processes: the run, Horovod's timeline, ranks and hosts. No thread has the number
#: of its process, because Perfetto would call it the main thread.
RUN: Final = 1
TIMELINE: Final = 2
_RANKS, _HOSTS = 1_000_000, 2_000_000
#: The threads of a rank's process that do not come from its framework's profiler.
MOMENTS, STEPS, FIRST_FOREIGN = 10, 11, 20
# A longer gap between two summaries is shown as zero.
_GAP_MICROS = 100_000.0


def pid_of_rank(rank: int) -> int:
    """The process of a rank."""
    return _RANKS + rank


def pid_of_host(number: int) -> int:
    """The process of a host; hosts are numbered by their lowest rank."""
    return _HOSTS + number


def process(pid: int, name: str) -> Iterator[Event]:
    """Name a process."""
    yield _metadata(pid, 0, "process_name", {"name": name})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})


def thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    """Name a thread."""
    yield _metadata(pid, tid, "thread_name", {"name": name})
    yield _metadata(pid, tid, "thread_sort_index", {"sort_index": tid})


def _metadata(pid: int, tid: int, kind: str, args: Event) -> Event:
    return {"ph": "M", "name": kind, "ts": 0, "pid": pid, "tid": tid, "args": args}


def instant(
    pid: int, tid: int, name: str, ts: float, args: Mapping[str, Any] | None = None
) -> Event:
    """A moment of a thread; ``args`` are shown with it."""
    event = {"ph": "i", "s": "t", "name": name, "ts": _micros(ts), "pid": pid, "tid": tid}
    return {**event, "args": args} if args else event


def span(
    pid: int,
    tid: int,
    name: str,
    times: tuple[float, float],
    args: Mapping[str, Any] | None = None,
) -> Event:
    """A time of a thread, between two moments; ``args`` are shown with it."""
    # Rounded first: otherwise it could end a nanosecond after the next one begins.
    ts, end = map(_micros, times)
    duration = round(max(0.0, end - ts), 3)
    event = {"ph": "X", "name": name, "ts": ts, "dur": duration, "pid": pid, "tid": tid}
    return {**event, "args": args} if args else event


def counter(
    pid: int, name: str, rows: Iterable[tuple[float, float, Mapping[str, float]]]
) -> Iterator[Event]:
    """A counter of a process: for consecutive times their begin and end, and values by series."""
    end, values = None, dict[str, float]()
    for begin, until, now in rows:
        if end is not None and begin - end > _GAP_MICROS:
            yield _count(pid, name, end, dict.fromkeys(values, 0.0))
        yield _count(pid, name, begin, now)
        end, values = until, dict(now)
    if end is not None:
        yield _count(pid, name, end, dict.fromkeys(values, 0.0))


def _count(pid: int, name: str, ts: float, values: Mapping[str, float]) -> Event:
    args = {series: round(value, 3) for series, value in values.items()}
    return {"ph": "C", "name": name, "ts": _micros(ts), "pid": pid, "tid": 0, "args": args}


def _micros(moment: float) -> float:
    return round(max(0.0, moment), 3)
