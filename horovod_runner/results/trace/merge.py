"""Writes one trace of a run: its ranks, its hosts, and the traces of Horovod and torch."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from horovod_runner.results.private_files import replaced
from horovod_runner.results.trace import moments, summaries
from horovod_runner.results.trace.clocks import Clocks
from horovod_runner.results.trace.events import Event
from horovod_runner.results.trace.foreign import HorovodTimeline, TorchTrace
from horovod_runner.wire.events import TraceFile

if TYPE_CHECKING:
    from horovod_runner.results.run import Run


def write_trace(run: Run, path: str | os.PathLike[str]) -> list[str]:
    """Write a run's trace to a file; see :meth:`Run.trace`."""
    missing: list[str] = []
    if not run.profile.rows:
        missing.append(
            "The ranks have sent no summaries: there are no counters, and the clocks of hosts are "
            "not aligned. The run had DebugConfig(profile=False), or made no step."
        )
    found = [each for trace in run.traces if (each := _open(run, trace, missing)) is not None]
    clocks = Clocks(run, [(each.rank, each.began) for each in found])
    events = chain(
        moments.of_run(run, clocks),
        moments.of_ranks(run, clocks),
        summaries.of_ranks(run, clocks),
        summaries.of_hosts(run, clocks),
        *(trace.events(clocks) for trace in found),
    )
    _write(Path(path), events, _about(run, clocks))
    for each in found:
        if not each.is_complete:
            missing.append(f"The file {each.path} is cut: its last events are missing.")
    return missing


def _open(run: Run, trace: TraceFile, missing: list[str]) -> HorovodTimeline | TorchTrace | None:
    """Open a trace of Horovod or torch; None, and a sentence, if it cannot be merged."""
    try:
        if trace.kind == "torch":
            return TorchTrace(trace.rank, trace.path)
        if trace.kind == "horovod":
            timeline = HorovodTimeline(trace.path)
            if timeline.is_of(run.timings.queued, run.timings.end or run._clock()):
                return timeline
            raise ValueError("it is of another run, which wrote the same file")
        missing.append(f"TensorFlow's profile of rank {trace.rank} is not merged: {trace.path}")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        missing.append(f"{trace.path} is left out: {error}.")
    return None


def _about(run: Run, clocks: Clocks) -> dict[str, Any]:
    """What the trace says of itself."""
    return {
        "run": run.run_id,
        "main": run.main,
        "np": run.np,
        "status": run.status,
        "zero": clocks.zero,
        "zero_is": "seconds since the Unix epoch by the clock of rank 0's host",
        "clock_offsets": {str(rank): offset for rank, offset in clocks.offsets.items()},
        "driver_ahead": clocks.driver_ahead,
    }


def _write(path: Path, events: Iterable[Event], about: dict[str, Any]) -> None:
    encode = msgspec.json.Encoder().encode
    with (
        replaced(path, opener=None) as whole,
        gzip.open(whole, "wb") if path.suffix == ".gz" else nullcontext(whole) as file,
    ):
        file.write(b'{"displayTimeUnit": "ms",\n"otherData": ')
        file.write(encode(about))
        file.write(b',\n"traceEvents": [\n')
        separator = b""
        for event in events:
            file.write(separator)
            file.write(encode(event))
            separator = b",\n"
        file.write(b"\n]}\n")
