"""Moments of a trace: attempts, notices and the end of the run; epochs, checkpoints of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from horovod_runner.results.trace.clocks import Clocks, own_checkpoints
from horovod_runner.results.trace.events import (
    MOMENTS,
    RUN,
    Event,
    instant,
    pid_of_rank,
    process,
    span,
    thread,
)

if TYPE_CHECKING:
    from horovod_runner.results.run import Run

_MOST_NOTICES: Final = 1000
_MOST_CHARACTERS: Final = 100
_ATTEMPTS, _NOTICES = 10, 11


def of_run(run: Run, clocks: Clocks) -> Iterator[Event]:
    """What happened to the run, by the driver's clock."""
    yield from process(RUN, f"run {run.run_id}: {run.main}")
    yield from thread(RUN, _ATTEMPTS, "attempts")
    yield from thread(RUN, _NOTICES, "notices")
    timings, place = run.timings, clocks.by_driver
    known = [attempt.ended or attempt.started for attempt in run.attempts]
    end = place(max([run._until, *known]))
    for attempt in run.attempts:
        until = end if attempt.ended is None else place(attempt.ended)
        name = f"attempt {attempt.number}"
        about = {"resumed_from": attempt.resumed_from, "error": attempt.error}
        yield span(RUN, _ATTEMPTS, name, (place(attempt.started), until), about)
        if attempt.error:
            text = f"{name} failed: {attempt.error}"
            yield instant(RUN, _ATTEMPTS, _shortened(text), until, {"error": attempt.error})
    yield instant(RUN, _ATTEMPTS, "run called", place(timings.queued))
    if timings.first_line is not None:
        yield instant(RUN, _ATTEMPTS, "main began", place(timings.first_line))
    if timings.first_report is not None:
        yield instant(RUN, _ATTEMPTS, "first report", place(timings.first_report))
    if timings.end is not None:
        yield instant(RUN, _ATTEMPTS, f"run {run.status}", end)
    notices = [line for line in run.logs if line.stream == "notice"]
    for line in notices[-_MOST_NOTICES:]:
        yield instant(RUN, _NOTICES, _shortened(line.text), place(line.time), {"text": line.text})


def of_ranks(run: Run, clocks: Clocks) -> Iterator[Event]:
    """Epochs and the end of each rank, and checkpoints, by the clocks of their hosts."""
    rows, infos = run.profile.rows, {rank.rank: rank for rank in run.ranks}
    for rank in sorted({*rows, *infos, *(trace.rank for trace in run.traces)}):
        pid = pid_of_rank(rank)
        info = infos.get(rank)
        yield from process(pid, f"rank {rank}" + (f" on {info.host}" if info else ""))
        yield from thread(pid, MOMENTS, "epochs and checkpoints")
        if info is not None and info.exit_code is not None and rank in rows:
            ended = clocks.by_rank(rank, rows[rank][-1].time)
            yield instant(pid, MOMENTS, f"main ended, exit code {info.exit_code}", ended)
    for each in run._metrics.epoch_ends():
        yield instant(
            pid_of_rank(each.rank),
            MOMENTS,
            f"epoch {each.epoch}",
            clocks.by_rank(each.rank, each.time),
            {"step": each.step, **each.metrics},
        )
    for checkpoint in own_checkpoints(run):
        yield instant(
            pid_of_rank(0),  # rank 0 saves all checkpoints
            MOMENTS,
            f"checkpoint of step {checkpoint.step}",
            clocks.by_rank(0, checkpoint.saved_at),
            {"bytes": checkpoint.size, **checkpoint.metrics},
        )


def _shortened(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."
