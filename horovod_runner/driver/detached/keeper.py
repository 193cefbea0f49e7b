"""Keeps the events that a driver would show or store, until they can be brought to the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from horovod_runner.driver.detached.journal import JournalWriter
from horovod_runner.driver.intake import Content, Observer, no_archive
from horovod_runner.errors import CheckpointError
from horovod_runner.task.task import stderr_echo
from horovod_runner.wire import events, messages
from horovod_runner.wire.events import DriverEvent
from horovod_runner.wire.job import Kept


@dataclass(frozen=True)
class Capacity:
    """How much a stand-in keeps for the driver.

    That is characters and pieces of output, reports and the numbers in them, and few other events.
    """

    characters: int = 16 << 20
    texts: int = 500_000
    reports: int = 100_000
    numbers: int = 2_000_000
    few: int = 10_000


CAPACITY: Final = Capacity()


class Keeper(Observer):
    """The stand-in's observer.

    Args:
        journal: brings what is kept to the driver during the run; None: it waits for the end.
        required: whether a checkpoint that cannot be written ends the run.

    Attributes:
        cut: how many characters of output were too many to keep.
    """

    def __init__(
        self,
        journal: JournalWriter | None = None,
        capacity: Capacity = CAPACITY,
        *,
        required: bool = False,
    ) -> None:
        self._most = capacity
        self._journal = journal
        self._required = required
        self.cut = 0
        self._numbers = 0  # in the reports that are kept
        self._few: deque[Kept] = deque()
        self._few_cut = 0
        self._reports: list[Any] = []
        self._every, self._seen, self._left_out = 1, 0, 0
        self._texts: deque[Any] = deque()
        self._latest: deque[Kept] = deque(maxlen=capacity.reports)
        self._last: dict[object, Kept] = {}
        self._characters = 0
        self._in_parts: set[str] = set()  # names of files that the driver cannot get

    @property
    def kept(self) -> list[Kept]:
        """What was kept and is not in the journal."""
        few = list(self._few)
        if self._few_cut:
            text = (
                f"{self._few_cut:,} notices and messages about checkpoints were too many to keep: "
                f"the latest {self._most.few:,} are here"
            )
            few.insert(0, events.Notice(text))
        return [*few, *self._reports, *self._latest, *self._last.values(), *self._texts]

    def _take_all(self) -> list[Kept]:
        found = self.kept
        for kept in (self._few, self._reports, self._latest, self._last, self._texts):
            kept.clear()
        self._characters = self._few_cut = 0
        self._every, self._seen, self._numbers = 1, 0, 0
        return found

    def _keep_few(self, event: Kept) -> None:
        self._few.append(event)
        if len(self._few) > self._most.few:
            self._few.popleft()
            self._few_cut += 1

    def take(self, message: Content | DriverEvent) -> messages.Fetched | None:
        """See :class:`~horovod_runner.driver.intake.Observer`; so for all below."""
        match message:
            case messages.Fetch():
                return no_archive(message)
            case messages.FilePart():
                self._leave_out(message)
            case events.Saved() if message.marker.name in self._in_parts:
                self._in_parts.discard(message.marker.name)
                step = message.marker.step
                why = (
                    "the ranks reach neither the driver nor its folder of checkpoints. Set "
                    "checkpoint_dir to a folder or URL that driver and executors share."
                )
                self._keep_unsaved(events.Unsaved(message.rank, step, why))
            case events.Unsaved():
                self._keep_unsaved(message)
            case events.Notice():
                stderr_echo(message.text)  # until the driver shows it, it is in this executor's log
                self._keep_few(message)
            case events.Event():
                self._keep(message)
        return None

    def _keep(self, event: Kept) -> None:
        match event.kept:
            case "all":
                self._keep_few(event)
            case "text":
                self._keep_text(event)
            case "reports":
                self._keep_report(event)
            case "latest":
                self._latest.append(event)
            case "last":
                self._last[event.key] = event

    def _keep_unsaved(self, message: events.Unsaved) -> None:
        self._keep_few(message)
        if self._required:
            raise CheckpointError(
                f"the checkpoint of step {message.step} could not be written: {message.reason} "
                "CheckpointConfig(required=True) ends the run here."
            )

    def _leave_out(self, message: messages.FilePart) -> None:
        if messages.is_trace(message) and message.name not in self._in_parts:
            why = "In detached mode no files come back from the executors."
            self._keep_few(events.Untraced(message.rank, why))
        self._in_parts.add(message.name)

    def _keep_text(self, message: Any) -> None:
        self._texts.append(message)
        self._characters += len(message.text)
        while self._characters > self._most.characters or len(self._texts) > self._most.texts:
            first = self._texts.popleft()
            self._characters -= len(first.text)
            self.cut += len(first.text)

    def reports(self, reports: Sequence[events.Report]) -> None:
        for report in reports:
            self._keep_report(report)

    def _keep_report(self, report: Any) -> None:
        """Keep a report; above the limit drop every second one, then every second of the rest."""
        self._seen += 1
        if self._seen % self._every:
            self._left_out += 1 + report.left_out
            return
        if self._left_out:
            left_out = min(report.left_out + self._left_out, events.MOST_LEFT_OUT)
            report = msgspec.structs.replace(report, left_out=left_out)
            self._left_out = 0
        self._reports.append(report)
        self._numbers += len(report.metrics)
        if len(self._reports) > self._most.reports or self._numbers > self._most.numbers:
            dropped = self._reports[::2]
            self._left_out += sum(1 + each.left_out for each in dropped)
            self._reports = self._reports[1::2]
            self._numbers = sum(len(each.metrics) for each in self._reports)
            self._every *= 2

    def idle(self) -> None:
        if self._journal is not None and self._journal.ready and (kept := self._take_all()):
            self._journal.put(kept)
