"""Records output, reports, attempts and status of a run in ``runner.last_run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from horovod_runner.common.text import without_password
from horovod_runner.results.run import DETAILS_LEFT_OUT, Attempt, Line, Run, Status, TraceFile
from horovod_runner.sinks.sink import Sink
from horovod_runner.wire.slots import RankInfo

if TYPE_CHECKING:
    from horovod_runner.wire.measurements import Lines, Machine, Profile
    from horovod_runner.wire.messages import Controller, Report

_KEPT_CHARACTERS = 16 << 20
_KEPT_PIECES = 500_000  # of output: each takes about 160 bytes beside its characters
_DETAIL_CHARACTERS = 64 << 10
_ERROR_CHARACTERS = 1000
_KEPT_ATTEMPTS = 2000
_KEPT_DETAILS = 32


class Recorder(Sink):
    """Records the events of a run in a :class:`Run`.

    Args:
        run: the run.
        most_characters: how much of the output is kept.
        most_pieces: how many pieces of output are kept.
        most_attempts: how many attempts are kept: half of them the first, half the latest.
        most_details: of how many of them the details are kept, likewise.
        clock: the time in seconds since 1970; None: the run's.
    """

    def __init__(
        self,
        run: Run,
        *,
        most_characters: int = _KEPT_CHARACTERS,
        most_pieces: int = _KEPT_PIECES,
        most_attempts: int = _KEPT_ATTEMPTS,
        most_details: int = _KEPT_DETAILS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._run = run
        self._most_characters = most_characters
        self._most_pieces = most_pieces
        self._most_attempts = most_attempts
        self._most_details = most_details
        self._clock = clock or run._clock
        self._characters = 0
        self._attempt = 1
        self._placed = 0  # the attempt for which ``ranks`` was called last
        self._step_at: float | None = None  # the last sign of a step

    def attempt(self, number: int) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`, like the methods below."""
        self._attempt = number
        run, now = self._run, self._clock()
        latest = run.latest_checkpoint
        resumed_from = None if latest is None else latest.step
        run.attempts.append(Attempt(number, now, resumed_from=resumed_from))
        run.timings.launched = run.timings.launched or now
        self._cut_attempts()

    def _cut_attempts(self) -> None:
        """Of an attempt in the middle, drop the details; of very many, drop one as a whole."""
        attempts = self._run.attempts
        if len(attempts) > self._most_details:
            attempt = attempts[-1 - self._most_details // 2]
            if attempt.hosts:
                attempt.hosts = []
            if attempt.details:
                attempt.details = DETAILS_LEFT_OUT
        if len(attempts) > self._most_attempts:
            del attempts[self._most_attempts // 2]
            self._run.attempts_cut += 1

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        self._keep(rank, stream, text)

    def log(self, rank: int, text: str) -> None:
        self._keep(rank, "log", text)

    def notice(self, text: str) -> None:
        self._keep(-1, "notice", text)

    def _keep(
        self, rank: int, stream: Literal["stdout", "stderr", "log", "notice"], text: str
    ) -> None:
        run = self._run
        with run._lock:
            run._lines.append(Line(self._clock(), rank, stream, text))
            self._characters += len(text)
            while self._characters > self._most_characters or len(run._lines) > self._most_pieces:
                cut = len(run._lines.popleft().text)
                self._characters -= cut
                run.logs_cut += cut

    def controller(self, name: Controller) -> None:
        self._run.controller = name

    def ranks(self, ranks: list[RankInfo]) -> None:
        self._run.ranks = ranks
        if self._placed != self._attempt:  # the second call only adds exit codes
            self._placed = self._attempt
            for attempt in self._run.attempts[-1:]:
                attempt.size, attempt.hosts = len(ranks), [rank.host for rank in ranks]
            self._run.profile.begin([rank.host for rank in ranks])

    def began(self, rank: int) -> None:
        timings = self._run.timings
        timings.first_line = timings.first_line or self._clock()

    def reports(self, reports: Sequence[Report]) -> None:
        timings = self._run.timings
        if timings.first_report is None:
            timings.first_report = self._clock()
        self._run._metrics.extend(reports, self._attempt)
        self._on_step()

    def _on_step(self) -> None:
        """Note a sign of a step, and how long there was none before this attempt."""
        now = self._clock()
        attempts = self._run.attempts
        if len(attempts) > 1 and attempts[-1].pause is None and self._step_at is not None:
            attempts[-1].pause = now - self._step_at
        self._step_at = now

    def profile(self, profile: Profile) -> None:
        if profile.steps:
            self._on_step()
        self._run.profile.add(profile, self._clock())

    def machine(self, machine: Machine) -> None:
        self._run.profile.add_machine(machine)

    def lines(self, lines: Lines) -> None:
        self._run.profile.add_lines(lines)

    def trace(self, trace: TraceFile) -> None:
        self._run.traces[:] = [
            *(known for known in self._run.traces if known.path != trace.path),
            trace,
        ]

    def failed(self, error: BaseException) -> None:
        """Record that the current attempt has failed."""
        attempt = self._run.attempts[-1] if self._run.attempts else None
        if attempt is not None:
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
            attempt.error = _shortened(without_password(text))
            attempt.details = without_password(_details(error))
            attempt.ended = self._clock()

    def changed(self, reason: str) -> None:
        """Record that the current attempt has ended in favour of another number of ranks."""
        for attempt in self._run.attempts[-1:]:
            attempt.change, attempt.ended = reason, self._clock()

    def ended(self, status: Status) -> None:
        """Record that the run has ended."""
        run = self._run
        run.timings.end = self._clock()
        for attempt in run.attempts[-1:]:
            attempt.ended = attempt.ended or run.timings.end
        run.status = status


def _shortened(line: str) -> str:
    left_out = len(line) - _ERROR_CHARACTERS
    return line if left_out <= 0 else f"{line[:_ERROR_CHARACTERS]}... and {left_out:,} characters"


def _details(error: BaseException) -> str:
    """An error with those that caused it; of long ones the beginning and the end."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 10:  # an error may be its own cause
        texts.append(f"{type(cause).__name__}: {str(cause).strip()}".removesuffix(": "))
        cause = cause.__cause__
    text = "\n\nCaused by ".join(texts)
    if len(text) <= _DETAIL_CHARACTERS:
        return text
    half = _DETAIL_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out:,} characters are left out here ...\n{text[-half:]}"
