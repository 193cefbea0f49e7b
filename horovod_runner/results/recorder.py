"""Adds events to a run: ``runner.last_run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.text import encodable, without_password, without_secret
from horovod_runner.results.run import DETAILS_LEFT_OUT, Attempt, Line, Run
from horovod_runner.wire import events
from horovod_runner.wire.events import AttemptFailed, Event, Report
from horovod_runner.wire.measurements import Lines, Machine, Profile

_DETAIL_CHARACTERS: Final = 64 << 10
_ERROR_CHARACTERS: Final = 1000


@dataclass
class Recorder:
    """Adds events to a run, in the order in which they happened."""

    run: Run
    most_characters: int = 16 << 20  # of output
    most_pieces: int = 500_000  # of output: each takes about 160 bytes beside its characters
    most_attempts: int = 2000  # half of them the first, half the latest
    most_details: int = 32  # of how many of them the details are kept, likewise

    def __post_init__(self) -> None:
        self._characters = sum(len(line.text) for line in self.run._lines)

    def add(self, events: Sequence[Event], now: float) -> None:
        """Add events, in order, that arrived at a moment; reports of one rank together."""
        reports = [event for event in events if isinstance(event, Report)]
        if reports:
            self._add_reports(reports, now)
        if len(reports) < len(events):
            for event in events:
                self._add(event, now)

    def _add(self, event: Event, now: float) -> None:
        run = self.run
        match event:
            case events.Output():
                self._keep(Line(now, event.rank, event.stream, event.text))
            case events.Log():
                self._keep(Line(now, event.rank, "log", event.text))
            case events.Notice():
                self._keep(Line(now, -1, "notice", event.text))
            case Profile():
                if event.steps:
                    self._on_step(now)
                run.profile.add(event, now)
            case Machine():
                run.profile.add_machine(event)
            case Lines():
                run.profile.add_lines(event)
            case events.Began():
                run.timings.first_line = run.timings.first_line or now
            case events.CheckpointKept():
                run._checkpoints.append(Checkpoint(event.folder, event.marker))
            case events.TraceWritten():
                others = [known for known in run.traces if known.path != event.trace.path]
                run.traces[:] = [*others, event.trace]
            case _:
                self._add_to_attempt(event, now)

    def _add_to_attempt(self, event: Event, now: float) -> None:
        """Add what begins, changes or ends an attempt."""
        run = self.run
        attempt = run.attempts[-1] if run.attempts else None
        match event:
            case events.AttemptBegan():
                self._begin_attempt(Attempt(event.number, now, resumed_from=event.resumed_from))
            case events.ControllerChosen():
                run.controller = event.name
            case events.RanksPlaced():
                self._place(event, attempt)
            case events.AttemptFailed():
                if attempt is None:  # there were no slots for the first, for example
                    attempt = Attempt(1, now)
                    run.attempts.append(attempt)
                attempt.error, attempt.details = event.error, event.details
                attempt.ended = now
            case events.AttemptChanged() if attempt is not None:
                attempt.change, attempt.ended = event.reason, now
            case events.RunEnded():
                run.timings.end = now
                if attempt is not None:
                    attempt.ended = attempt.ended or now
                run.warnings[:], run.result_text = event.warnings, event.result_text
                run.status = event.status

    def _begin_attempt(self, attempt: Attempt) -> None:
        run = self.run
        run.attempts.append(attempt)
        run.timings.launched = run.timings.launched or attempt.started
        # Of an attempt in the middle the details are dropped; of very many, one as a whole.
        if len(run.attempts) > self.most_details:
            middle = run.attempts[-1 - self.most_details // 2]
            middle.hosts = []
            middle.details = DETAILS_LEFT_OUT if middle.details else ""
        if len(run.attempts) > self.most_attempts:
            del run.attempts[self.most_attempts // 2]
            run.attempts_cut += 1

    def _keep(self, line: Line) -> None:
        run = self.run
        with run._lock:
            run._lines.append(line)
            self._characters += len(line.text)
            while self._characters > self.most_characters or len(run._lines) > self.most_pieces:
                cut = len(run._lines.popleft().text)
                self._characters -= cut
                run.logs_cut += cut

    def _place(self, placed: events.RanksPlaced, attempt: Attempt | None) -> None:
        run = self.run
        run.ranks = placed.ranks
        if attempt is None or not attempt.hosts:  # the second time only adds exit codes
            hosts = [rank.host for rank in placed.ranks]
            if attempt is not None:
                attempt.size, attempt.hosts = len(hosts), hosts
            run.profile.begin(hosts)

    def _add_reports(self, reports: Sequence[Report], now: float) -> None:
        run = self.run
        run.timings.first_report = run.timings.first_report or now
        run._metrics.extend(reports, run.attempts[-1].number if run.attempts else 1)
        self._on_step(now)

    def _on_step(self, now: float) -> None:
        """Note a sign of a step, and how long there was none before this attempt."""
        attempts, timings = self.run.attempts, self.run.timings
        if len(attempts) > 1 and attempts[-1].pause is None and timings.last_step is not None:
            attempts[-1].pause = now - timings.last_step
        timings.last_step = now


def plain_params(np: int | tuple[int, int], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``np`` and the arguments of ``main`` that are plain numbers, strings or None.

    What looks like a password, a token or a key is hidden, also in URLs: sinks publish these.
    """
    plain = (bool, int, float, str, type(None))
    # As text where it is a range: MLflow and the record's file know no pairs.
    ranks = np if isinstance(np, int) else f"{np[0]} to {np[1]}"
    given = {name: value for name, value in kwargs.items() if type(value) in plain}
    shown = {name: _recordable(without_secret(name, value)) for name, value in given.items()}
    return {"np": ranks, **shown}


def _recordable(value: object) -> object:
    """A param as the record's file can hold it: UTF-8, and whole numbers of 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return hex(value)  # str refuses very long ones
    return encodable(value) if isinstance(value, str) else value


def failed(error: BaseException) -> AttemptFailed:
    """The event of an attempt that has failed with an error."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
    details = without_password(_details(error))
    return AttemptFailed(encodable(_shortened(without_password(text))), encodable(details))


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
