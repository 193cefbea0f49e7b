"""The traces that Horovod and torch have written, as events of the run's trace."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, TextIO

from horovod_runner.results.trace.clocks import Clocks
from horovod_runner.results.trace.events import (
    FIRST_FOREIGN,
    STEPS,
    TIMELINE,
    Event,
    instant,
    pid_of_rank,
    process,
    span,
    thread,
)
from horovod_runner.worker.profiling.framework_profiler import METADATA

# How far the driver's clock may be from that of rank 0's host.
_SLACK_SECONDS: Final = 3600.0
# Events that are joined by an id: a kernel with its launch, a backward with its forward. Each rank
# counts its ids from 1; Perfetto requires numbers, which JSON holds exactly up to 2**53.
_FLOWS: Final = ("s", "t", "f")
_FLOW_IDS: Final = 1 << 33
_PIECE: Final = 1 << 20  # characters that are read at a time
_LONGEST: Final = 16 << 20  # the longest object
_BETWEEN: Final = re.compile(r"[\s,]*")


class HorovodTimeline:
    """Horovod's timeline: one process, with a thread for each tensor.

    Its times count from the start of Horovod on rank 0. Horovod writes that moment, by the clock of
    rank 0's host, into the first event (timeline.cc, WriteAtFileStart).

    Attributes:
        is_complete: whether its end was there, once its events have been read.
        began: the start of Horovod, in seconds since the Unix epoch by rank 0's clock.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a timeline, or does not say when it began.
    """

    def __init__(self, path: str) -> None:
        self.rank = 0
        self.path = path
        with _opened(path) as file:
            first = next(iter(_JsonArray(file, r"^\s*\[")), {})
        micros = first.get("args", {}).get("start_time_since_epoch_in_micros")
        if not isinstance(micros, int):
            raise ValueError("it does not say when it began")
        self._micros = micros
        self.began = micros * 1e-6

    def is_of(self, began: float, ended: float) -> bool:
        """Whether it began within a run; a later run may have overwritten the file."""
        return began - _SLACK_SECONDS <= self.began <= ended + _SLACK_SECONDS

    def events(self, clocks: Clocks) -> Iterator[Event]:
        """Its events on the time line of the run."""
        shift = round(self._micros - clocks.zero * 1e6, 3)
        tensors: dict[int, _Spans] = {}
        latest = 0.0
        yield from process(TIMELINE, "Horovod's timeline, of rank 0")
        with _opened(self.path) as file:
            array = _JsonArray(file, r"^\s*\[")
            for event in array:
                kind, tensor = event["ph"], FIRST_FOREIGN + event.get("pid", 0)
                if kind == "M":
                    name = event.get("args", {}).get("name")
                    if event["name"] == "process_name" and name is not None:
                        yield from thread(TIMELINE, tensor, name)
                    continue
                latest = event["ts"] + shift
                if kind == "X":  # a rank has the tensor ready; the name is its number
                    yield instant(TIMELINE, tensor, f"rank {event['name']} is ready", latest)
                elif kind == "i":
                    yield instant(TIMELINE, tensor, event["name"], latest)
                elif kind == "B":
                    tensors.setdefault(tensor, _Spans(tensor)).begin(event["name"], latest)
                elif kind == "E" and tensor in tensors:
                    yield from tensors[tensor].end(latest, event.get("args", {}))
        self.is_complete = array.is_complete
        for spans in tensors.values():
            yield from spans.close(latest)


class _Spans:
    """Makes one event of each pair of begin and end of a tensor.

    Perfetto puts an end before the begin if both have the same microsecond.
    """

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self._spans: list[Event] = []  # in the order of their begins, until all are closed
        self._open: list[Event] = []

    def begin(self, name: str, ts: float) -> None:
        """Begin a span inside those that are open."""
        event = span(TIMELINE, self._tid, name, (ts, ts))
        self._spans.append(event)
        self._open.append(event)

    def end(self, ts: float, args: Event) -> Iterator[Event]:
        """End the innermost one; yields all of them if no other is open."""
        if self._open:
            event = self._open.pop()
            event["dur"] = round(max(0.0, ts - event["ts"]), 3)
            event.update({"args": args} if args else {})
        if not self._open:
            yield from self._spans
            self._spans = []

    def close(self, ts: float) -> Iterator[Event]:
        """End those that are open where the file ends."""
        while self._open:
            yield from self.end(ts, {})


class TorchTrace:
    """A trace of torch's profiler (Kineto): threads of the rank's process.

    Attributes:
        is_complete: whether its end was there, once its events have been read.
        began: when it began, in seconds since the Unix epoch by the clock of the rank's host.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a trace.
    """

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        self.path = path
        with _opened(path) as file:
            head = json.loads(f"{_JsonArray(file, _EVENTS).head} {_NO_EVENTS}")
        # The times of events count from there; before torch 2.4, from the Unix epoch.
        self._base = int(head.get("baseTimeNanoseconds", 0))
        known = head.get(METADATA)
        if known is None:
            raise ValueError("it does not say which steps it holds")
        self._steps: list[tuple[int, int]] = known["steps"]
        self.began: float = known["began"] * 1e-9

    def events(self, clocks: Clocks) -> Iterator[Event]:
        """Its events on the time line of the run, and its steps."""
        pid = pid_of_rank(self.rank)
        yield from thread(pid, STEPS, "steps")
        for (_, begin), (step, end) in zip(self._steps, self._steps[1:], strict=False):
            times = clocks.by_rank(self.rank, begin * 1e-9), clocks.by_rank(self.rank, end * 1e-9)
            yield span(pid, STEPS, f"step {step}", times)
        zero = clocks.zero + clocks.offsets.get(self.rank, 0.0)
        shift = round(self._base * 1e-3 - zero * 1e6, 3)
        threads: dict[tuple[Any, Any], int] = {}
        names: dict[int, str] = {}
        with _opened(self.path) as file:
            array = _JsonArray(file, _EVENTS)
            for event in array:
                where = event.get("pid"), event.get("tid", 0)
                if not isinstance(where[0], int):
                    continue  # the span of the recording itself
                if event["ph"] == "M":
                    if event["name"] == "thread_name":
                        tid = threads.setdefault(where, FIRST_FOREIGN + len(threads))
                        names[tid] = event["args"]["name"]
                    continue
                tid = threads.setdefault(where, FIRST_FOREIGN + len(threads))
                ts = round(event["ts"] + shift, 3)
                placed = {**event, "ts": ts, "pid": pid, "tid": tid}
                if event["ph"] in _FLOWS:
                    placed["id"] = self.rank * _FLOW_IDS + int(event["id"]) % _FLOW_IDS
                yield placed
        self.is_complete = array.is_complete
        for tid, name in names.items():
            yield from thread(pid, tid, f"torch, {name.strip()}")


_EVENTS: Final = r'"traceEvents"\s*:\s*\['
_NO_EVENTS: Final = '"traceEvents": []}'


class _JsonArray:
    """The objects of an array in a file; iterate over it once. It may be larger than the memory.

    Attributes:
        head: the text before the array.
        is_complete: whether the array has been read to its end; a rank that was killed while it
            wrote leaves a part.

    Raises:
        ValueError: the file has no such array.
    """

    def __init__(self, file: TextIO, opening: str) -> None:
        self._file = file
        self.is_complete = False
        text, found = "", None
        while found is None:
            piece = file.read(_PIECE)
            text += piece
            found = re.search(opening, text)
            if found is None and (not piece or len(text) > _LONGEST):
                raise ValueError("it is not a trace")
        self.head = text[: found.start()]
        self._text = text[found.end() :]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        text, at = self._text, 0
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches ""
            if text.startswith("]", at):
                self.is_complete = True
                return
            try:
                found, at = decode(text, at)
            except ValueError:  # it is cut here, or by the end of the piece
                piece = self._more()
                if not piece or len(text) - at > _LONGEST:
                    return
                text, at = text[at:] + piece, 0
                continue
            if isinstance(found, dict):
                yield found

    def _more(self) -> str:
        """Some more text; empty at the end, and where a compressed file is damaged."""
        with suppress(OSError, EOFError, zlib.error):
            return self._file.read(_PIECE)
        return ""


def _opened(path: str) -> Any:
    open_file: Any = gzip.open if path.endswith(".gz") else open
    return open_file(path, "rt", encoding="utf-8", errors="replace")
