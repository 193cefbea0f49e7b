"""What a run is doing now: for ``horovod-runner top`` and for the panel in a notebook.

It stays small for any number of ranks, and is cheap enough to be computed every second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from statistics import fmean, median
from typing import Final

import msgspec

from horovod_runner.common.slots import RankInfo
from horovod_runner.common.text import bytes_text, duration_text, rate_text, without_password
from horovod_runner.results.metrics_table import Position
from horovod_runner.results.run import Line, Run
from horovod_runner.results.slowness.profile import Recent
from horovod_runner.results.slowness.totals import spent_of
from horovod_runner.wire.events import Status
from horovod_runner.wire.measurements import Profile, steps_of

MAX_RANKS: Final = 20  # of more ranks, the slowest of this number are listed
MAX_METRICS: Final = 8
MAX_LINES: Final = 20
_LINE_CHARACTERS: Final = 400
# "Now" is the last five seconds, or longer where steps are slow: then it is the last five steps.
_NOW_SECONDS: Final = 5.0
_NOW_STEPS: Final = 5
_LONGEST_SECONDS: Final = 60.0
_QUIET_SECONDS: Final = 5.0  # from which a rank without a summary is marked
_SUMMARY_SECONDS: Final = 2.0  # two summaries of a rank are not further apart while it makes steps
_VERDICT_SECONDS: Final = 5.0
_VERDICT_SHARE: Final = 20  # a verdict that takes a second is kept for twenty
_ESCAPES: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Shares(msgspec.Struct, frozen=True):
    """Where the time of a rank's main thread goes: parts of 1.

    Attributes:
        data: waiting for a batch.
        calls: in ``report`` and ``save_checkpoint``.
    """

    compute: float = 0.0
    data: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    calls: float = 0.0


class LiveRank(msgspec.Struct):
    """What a rank is doing now.

    Attributes:
        rate: steps per second; None before it has counted any.
        silent: seconds since its last summary. A rank sends one a second, but none while a single
            step or call lasts.
        memory: bytes of its process and of those that it has started; None before the first
            measurement, like the fields below.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    rate: float | None = None
    shares: Shares | None = None
    silent: float | None = None
    cpu: float | None = None
    memory: int | None = None
    host_cores: float | None = None
    of_cores: int | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether it has sent no summary for long."""
        return self.silent is not None and self.silent > _QUIET_SECONDS

    @property
    def cores(self) -> str:
        """Busy cores of its host, of those that it may use; empty if they are not known."""
        return "" if self.host_cores is None else f"{self.host_cores:.1f}/{self.of_cores}"


class Others(msgspec.Struct):
    """The ranks that are not listed one by one: medians over them, and the mean of their shares."""

    count: int
    rate: float | None = None
    shares: Shares | None = None
    cpu: float | None = None
    memory: int | None = None


class Live(msgspec.Struct):
    """What a run is doing now.

    Attributes:
        attempt: 1 for the first launch, plus 1 for each restart; 0 before it.
        elapsed: seconds since ``run`` was called.
        size: the number of ranks; 0 until all have started.
        step: the last one that rank 0 reported; otherwise how many steps it has counted.
        rate: steps per second in the median over the ranks; None before there were any.
        shares: where the ranks' time goes, in the mean.
        memory: bytes of all ranks; None before the first measurement.
        verdict: what ``diagnose`` names first, in one line; empty if nothing stands out.
        ranks: all, by number; of more than 20, the 20 slowest, the slowest first.
        lines: the last 20 lines of output and notices, without colours and control characters.
    """

    run_id: str
    time: float
    main: str = ""
    np: int | tuple[int, int] = 0
    where: str = ""
    status: Status = "running"
    attempt: int = 0
    error: str = ""
    elapsed: float = 0.0
    size: int = 0
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    rate: float | None = None
    shares: Shares | None = None
    metrics: dict[str, float | int] = {}
    memory: int | None = None
    checkpoint: int | None = None
    verdict: str = ""
    ranks: list[LiveRank] = []
    others: Others | None = None
    lines: list[str] = []

    @property
    def restarts(self) -> int:
        """How often the ranks were launched again."""
        return max(0, self.attempt - 1)

    @property
    def done(self) -> float | None:
        """The share of the steps that are done; None if it is not known."""
        if self.step is None or not self.total_steps:
            return None
        return min(1.0, self.step / self.total_steps)

    @property
    def how_far(self) -> str:
        """The step and the epoch: "epoch 2, step 341 of 1,200"."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch}, "
        of = f" of {self.total_steps:,}" if self.total_steps else ""
        return f"{epoch}step {self.step or 0:,}{of}"

    @property
    def pace(self) -> list[str]:
        """While it runs: "10 steps/s", and how much time is left if that is known."""
        if self.rate is None or self.status != "running":
            return []
        found = [f"{rate_text(self.rate)} steps/s"]
        step, total = self.step or 0, self.total_steps
        if total and self.rate and step < total:
            found.append(f"{duration_text((total - step) / self.rate)} left")
        return found

    @property
    def numbers(self) -> list[str]:
        """Metrics, memory and the latest checkpoint, each with its name."""
        found = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
            for name, value in self.metrics.items()
        ]
        if self.memory is not None:
            found.append(f"memory {bytes_text(self.memory)}")
        if self.checkpoint is not None:
            found.append(f"checkpoint of step {self.checkpoint:,}")
        return found


def live(run: Run) -> Live:
    """Say what a run is doing now. Any thread may call it while the run goes on."""
    attempts = list(run.attempts)
    until = run._until
    ranks = list(_ranks(run, attempts[-1].started if attempts else 0.0, until))
    memory = [rank.memory for rank in ranks if rank.memory is not None]
    checkpoint = run.latest_checkpoint
    reports = run._metrics.ranks.get(0)
    position = Position() if reports is None else reports.position
    shown, rest = _slowest(ranks)
    return Live(
        run_id=run.run_id,
        time=time.time(),
        main=run.main,
        np=run.np,
        where=run.where,
        status=run.status,
        attempt=attempts[-1].number if attempts else 0,
        error=without_password(next((each.error for each in reversed(attempts) if each.error), "")),
        elapsed=max(0.0, until - run.timings.queued),
        size=len(ranks),
        step=_step(run, position),
        total_steps=position.total_steps,
        epoch=position.epoch,
        rate=_median(rank.rate for rank in ranks),
        shares=_mean(ranks),
        metrics=dict(list(run.latest_metrics.items())[:MAX_METRICS]),
        memory=sum(memory) if memory else None,
        checkpoint=None if checkpoint is None else checkpoint.step,
        verdict=_verdict(run),
        ranks=shown,
        others=_others(rest),
        lines=_text(run.last_lines(MAX_LINES), len(ranks)),
    )


def _step(run: Run, position: Position) -> int | None:
    step = position.step
    if step is None:
        return run.profile.steps(0) or None
    # Steps were counted from 0.
    return step + (run.status == "finished" and step + 1 == position.total_steps)


def _ranks(run: Run, since: float, now: float) -> Iterator[LiveRank]:
    """All ranks; what was heard before a moment does not count."""
    recent = run.profile.recent()
    for info in run.ranks:
        yield _rank(info, recent.get(info.rank), since, now)


def _rank(info: RankInfo, known: Recent | None, since: float, now: float) -> LiveRank:
    rank = LiveRank(info.rank, info.host, info.pid)
    if known is None:
        return rank
    machine, is_heard = known.machine, known.heard >= since
    # Also before its first step.
    if machine is not None and (is_heard or machine.time >= since):
        rank.memory, rank.host_cores = machine.memory, machine.cores
        rank.of_cores = machine.of_cores
    rows = list(_now(known.rows)) if is_heard else []
    seconds = sum(row.seconds for row in rows)
    if seconds:
        steps = sum(steps_of(row.steps) for row in rows)
        rank.rate, rank.silent = steps / seconds, max(0.0, now - known.heard)
        if rank.silent > _SUMMARY_SECONDS:  # it has not finished a step since
            rank.rate = min(rank.rate, 1 / (rank.silent - _SUMMARY_SECONDS))
        each = [spent_of(row).values() for row in rows]
        spent = [sum(some) for some in zip(*each, strict=True)]
        # What a rank has waited for counts in the second in which the wait ends.
        whole = max(seconds, sum(spent))
        data, waiting, moving, *calls = (part / whole for part in spent)
        compute = max(0.0, 1.0 - sum(spent) / whole)
        rank.shares = Shares(compute, data, waiting, moving, sum(calls))
        rank.cpu = sum(row.cpu for row in rows) / seconds
    return rank


def _now(rows: list[Profile]) -> Iterator[Profile]:
    """The latest of a rank's summaries."""
    seconds, steps = 0.0, 0
    for row in reversed(rows):
        yield row
        seconds += row.seconds
        steps += steps_of(row.steps)
        if seconds >= _NOW_SECONDS and (steps >= _NOW_STEPS or seconds >= _LONGEST_SECONDS):
            return


def _slowest(ranks: list[LiveRank]) -> tuple[list[LiveRank], list[LiveRank]]:
    """The slowest ranks, and the others; all ranks in their order if they are few."""
    if len(ranks) <= MAX_RANKS:
        return ranks, []
    ordered = sorted(ranks, key=_busy, reverse=True)
    return ordered[:MAX_RANKS], ordered[MAX_RANKS:]


def _busy(rank: LiveRank) -> float:
    """Seconds of a step in which a rank did not wait for others.

    Ranks that reduce together take equally many steps: the slow one is the one that never waits.
    """
    if rank.shares is None:
        return 0.0
    own = 1.0 - rank.shares.waiting - rank.shares.moving
    return own / rank.rate if rank.rate else float("inf")


def _others(ranks: list[LiveRank]) -> Others | None:
    if not ranks:
        return None
    memory = _median(rank.memory for rank in ranks)
    return Others(
        len(ranks),
        _median(rank.rate for rank in ranks),
        _mean(ranks),
        _median(rank.cpu for rank in ranks),
        None if memory is None else round(memory),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(ranks: Iterable[LiveRank]) -> Shares | None:
    known = [msgspec.structs.astuple(rank.shares) for rank in ranks if rank.shares is not None]
    return Shares(*map(fmean, zip(*known, strict=True))) if known else None


def _verdict(run: Run) -> str:
    """What ``diagnose`` names first. With a thousand ranks it takes a second, so it is kept."""
    text, until = run._verdict
    began = time.monotonic()
    if began < until and run.status == "running":
        return text
    first = next(iter(run.diagnose().findings), None)
    text = "" if first is None else f"{first.sentence}. -> {first.advice}"
    now = time.monotonic()
    run._verdict = text, now + max(_VERDICT_SECONDS, _VERDICT_SHARE * (now - began))
    return text


def _text(pieces: list[Line], size: int) -> list[str]:
    """The last lines, each with who printed it."""
    lines = []
    for piece in pieces:
        who = f"[{piece.rank}] " if size > 1 and piece.stream in ("stdout", "stderr") else ""
        who = "HorovodRunner: " if piece.stream == "notice" else who
        last = piece.text.removesuffix("\n").rsplit("\n", MAX_LINES)[-MAX_LINES:]
        lines += [f"{who}{as_shown(line)[:_LINE_CHARACTERS]}" for line in last]
    return lines[-MAX_LINES:]


def as_shown(line: str) -> str:
    """A line as it looks in a terminal, without colours: of a progress bar, its last state."""
    plain = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]
    return _CONTROLS.sub("", plain)
