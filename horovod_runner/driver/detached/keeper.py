"""Keeps what a driver would show or store, until it can be brought to the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from horovod_runner.driver.detached.journal import JournalWriter
from horovod_runner.driver.intake import Content, no_archive
from horovod_runner.errors import CheckpointError
from horovod_runner.task.task import stderr_echo
from horovod_runner.wire.job import Kept, Live
from horovod_runner.wire.measurements import Lines, Machine, Profile
from horovod_runner.wire.messages import (
    Began,
    Controller,
    Fetch,
    Fetched,
    FilePart,
    Log,
    Output,
    Report,
    Saved,
    Unsaved,
    Untraced,
    is_trace,
)
from horovod_runner.wire.slots import Call, ChannelAddress, RankInfo

_KEPT_CHARACTERS = 16 << 20
_KEPT_MESSAGES = 500_000
_KEPT_REPORTS = 100_000
_KEPT_NUMBERS = 2_000_000
_KEPT_FACTS = 10_000


class Keeper:
    """The stand-in's observer.

    Args:
        journal: brings what is kept to the driver during the run; None: it waits for the end.
        required: whether a checkpoint that cannot be written ends the run.
        most_characters: how much output to keep.
        most_reports: how many reports to keep.
        most_numbers: how many numbers of reports to keep.
        most_facts: how many notices, saved checkpoints and the like to keep.

    Attributes:
        cut: how many characters of output were too many to keep.
        chosen: what Horovod coordinates with; None before the ranks are placed.
    """

    def __init__(
        self,
        journal: JournalWriter | None = None,
        *,
        required: bool = False,
        most_characters: int = _KEPT_CHARACTERS,
        most_reports: int = _KEPT_REPORTS,
        most_numbers: int = _KEPT_NUMBERS,
        most_facts: int = _KEPT_FACTS,
    ) -> None:
        self._most_characters = most_characters
        self._most_reports = most_reports
        self._most_numbers = most_numbers
        self._numbers = 0  # in the reports that are kept
        self._journal = journal
        self._required = required
        self.cut = 0
        self.chosen: Controller | None = None
        self._most_facts = most_facts
        self._facts: deque[Began | Saved | Unsaved | Untraced | str] = deque()
        self._facts_cut = 0
        self._reports: list[Report] = []
        self._every, self._seen, self._left_out = 1, 0, 0
        self._texts: deque[Output | Log] = deque()
        self._profiles: deque[Profile | Machine] = deque(maxlen=most_reports)
        self._lines: dict[tuple[int, str], Lines] = {}
        self._characters = 0
        self._in_parts: set[str] = set()  # names of files that the driver cannot get
        self._untold = Live([])  # what is to be told beside messages

    @property
    def kept(self) -> list[Kept]:
        """What was kept and is not in the journal."""
        lines = self._lines.values()
        return [
            *self._cut_notice(),
            *self._facts,
            *self._reports,
            *self._profiles,
            *lines,
            *self._texts,
        ]

    def _take_all(self) -> Live:
        """What was kept; nothing is kept after that."""
        live = msgspec.structs.replace(self._untold, kept=self.kept)
        self._untold = Live([])
        for kept in (self._facts, self._reports, self._profiles, self._lines, self._texts):
            kept.clear()
        self._characters = self._facts_cut = 0
        self._every, self._seen, self._numbers = 1, 0, 0
        return live

    def _cut_notice(self) -> list[str]:
        if not self._facts_cut:
            return []
        return [
            f"{self._facts_cut:,} notices and messages about checkpoints were too many to keep: "
            f"the latest {self._most_facts:,} are here"
        ]

    def _keep_fact(self, fact: Began | Saved | Unsaved | Untraced | str) -> None:
        self._facts.append(fact)
        if len(self._facts) > self._most_facts:
            self._facts.popleft()
            self._facts_cut += 1

    def take(self, message: Content) -> Fetched | None:
        """See :class:`~horovod_runner.driver.intake.Observer`; so for all below."""
        match message:
            case Fetch():
                return no_archive(message)
            case FilePart():
                self._leave_out(message)
            case Saved() if message.marker.name in self._in_parts:
                self._in_parts.discard(message.marker.name)
                step = message.marker.step
                why = (
                    "the ranks reach neither the driver nor its folder of checkpoints. Set "
                    "checkpoint_dir to a folder or URL that driver and executors share."
                )
                self._keep_unsaved(Unsaved(message.rank, step, why))
            case Unsaved():
                self._keep_unsaved(message)
            case Began() | Saved() | Untraced():
                self._keep_fact(message)
            case Output() | Log():
                self._keep_text(message)
            case Profile() | Machine():
                self._profiles.append(message)
            case Lines():
                self._lines[message.rank, message.thread] = message
            case _:
                assert_never(message)
        return None

    def _keep_unsaved(self, message: Unsaved) -> None:
        self._keep_fact(message)
        if self._required:
            raise CheckpointError(
                f"the checkpoint of step {message.step} could not be written: {message.reason} "
                "CheckpointConfig(required=True) ends the run here."
            )

    def _leave_out(self, message: FilePart) -> None:
        if is_trace(message) and message.name not in self._in_parts:
            why = "In detached mode no files come back from the executors."
            self._keep_fact(Untraced(message.rank, why))
        self._in_parts.add(message.name)

    def _keep_text(self, message: Output | Log) -> None:
        self._texts.append(message)
        self._characters += len(message.text)
        while self._characters > self._most_characters or len(self._texts) > _KEPT_MESSAGES:
            first = self._texts.popleft()
            self._characters -= len(first.text)
            self.cut += len(first.text)

    def reports(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._keep_report(report)

    def _keep_report(self, report: Report) -> None:
        """Keep a report; above the limit drop every second one, then every second of the rest."""
        self._seen += 1
        if self._seen % self._every:
            self._left_out += 1 + report.left_out
            return
        if self._left_out:
            report = msgspec.structs.replace(report, left_out=report.left_out + self._left_out)
            self._left_out = 0
        self._reports.append(report)
        self._numbers += len(report.metrics)
        if len(self._reports) > self._most_reports or self._numbers > self._most_numbers:
            dropped = self._reports[::2]
            self._left_out += sum(1 + each.left_out for each in dropped)
            self._reports = self._reports[1::2]
            self._numbers = sum(len(each.metrics) for each in self._reports)
            self._every *= 2

    def notice(self, text: str) -> None:
        stderr_echo(text)  # until the driver shows it, it is in this executor's log
        self._keep_fact(text)

    def controller(self, name: Controller) -> None:
        self.chosen = name
        self._untold = msgspec.structs.replace(self._untold, controller=name)

    def ranks(self, ranks: list[RankInfo]) -> None:
        self._untold = msgspec.structs.replace(self._untold, ranks=ranks)

    def detached(
        self, address: ChannelAddress, wake: Callable[[], None], task_0: tuple[str, Call] | None
    ) -> None:
        """The tasks reach this process."""

    def say_detached(self) -> None:
        """The tasks reach this process."""

    def idle(self) -> None:
        if self._journal is not None and self._journal.ready:
            live = self._take_all()
            if live != Live([]):
                self._journal.put(live)
