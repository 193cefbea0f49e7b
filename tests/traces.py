"""Reads a trace, and checks that it is one as Perfetto and Chrome read it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """The events of a trace, which is well formed."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(text)["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """Every event has its place, spans of a thread nest, and counters come in order."""
    spans: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    counts: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        assert {"ph", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ph"] in "MCXisf", event
        assert event["ts"] >= 0, event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            spans[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
        elif event["ph"] == "C":
            counts[event["pid"], event["name"]].append(event["ts"])
        elif event["ph"] in "sf":
            assert isinstance(event["id"], int), event  # Perfetto requires a number
    for thread in spans.values():
        open_until: list[int] = []
        for begin, end in sorted(thread, key=lambda times: (times[0], -times[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (begin, end, open_until)
            open_until.append(end)
    for times in counts.values():
        assert times == sorted(times)


def process(events: list[Event], name: str) -> int:
    """The number of the process with this name."""
    (pid,) = [e["pid"] for e in events if e["ph"] == "M" and e["args"].get("name") == name]
    return int(pid)


def threads(events: list[Event], pid: int) -> dict[str, int]:
    """The threads of a process by their names."""
    named = [e for e in events if e.get("name") == "thread_name" and e["pid"] == pid]
    return {e["args"]["name"]: e["tid"] for e in named}


def spans(events: list[Event], pid: int, name: str) -> list[tuple[float, float]]:
    """The times of a process's spans of this name, in order."""
    found = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["name"] == name]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in found)


def moments(events: list[Event], name: str) -> list[float]:
    """The times of instants of this name."""
    return [e["ts"] for e in events if e["ph"] == "i" and e["name"] == name]
