"""Passes what the ranks send to the sinks and to the checkpoint archive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import cast

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.limits import Limits
from horovod_runner.driver.detached.journal import JournalReader, JournalSource
from horovod_runner.driver.detached.served import CalledFolder
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.problems import describe
from horovod_runner.results.trace.arrivals import Arrivals
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.wire import events, measurements, messages
from horovod_runner.wire.addresses import Call, ChannelAddress
from horovod_runner.wire.events import DriverEvent, TraceFile
from horovod_runner.wire.job import Kept, Record
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.worker.profiling.framework_profiler import FIRST_STEP, LAST_STEP

_FULL_TIMELINE = "The disk is full: free space, or name a file on another one (timeline)."

#: What a rank sends that is neither about its life nor for the other ranks.
Content = messages.RankEvent | messages.FilePart | messages.Fetch
#: What a task sends about its own rank.
OwnMessage = (
    messages.Started
    | messages.Weights
    | measurements.Note
    | messages.Fence
    | messages.Lookup
    | messages.Failed
    | Content
)


class Observer:
    """Receives what the ranks send, and what the supervisor has to say."""

    def take(self, message: Content | DriverEvent) -> messages.Fetched | None:
        """Receive an event, or another message of a rank; returns the answer to a Fetch.

        Raises:
            CheckpointError: a checkpoint that is required could not be written.
            ValueError: no rank of this run sends such a message.
        """
        raise NotImplementedError

    def reports(self, reports: Sequence[events.Report]) -> None:
        """Receive reports of one rank."""
        raise NotImplementedError

    def detached(
        self, address: ChannelAddress, wake: Callable[[], None], task_0: tuple[str, Call] | None
    ) -> None:
        """Called when the tasks may be doing without this process.

        They do not reach the ``address``. ``wake`` makes the supervisor call :meth:`idle`;
        ``task_0`` is as in :class:`~horovod_runner.driver.launcher.Launch`.
        """

    def say_detached(self) -> None:
        """Tell the user that they do, and how their messages arrive; again if that changes."""

    def idle(self) -> None:
        """Called at least once a second."""


class Intake(Observer):
    """The driver's observer.

    Args:
        archive: takes the checkpoints and the timeline; None where there is no place for them.
        plan: where the journal is, if the tasks do without the driver.

    Attributes:
        problem: why the stand-in has ended the run; None if it has not.
    """

    def __init__(
        self,
        sink: FanOut,
        archive: Archive | None,
        traces: Arrivals,
        plan: CheckpointPlan,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._sink = sink
        self._archive = archive
        self._traces = traces
        self._plan = plan
        self._untraced = False
        self.problem: CheckpointError | None = None
        self._journal: JournalReader | None = None
        self._unreached: ChannelAddress | None = None
        self._said: tuple[JournalSource | None] | None = None

    def reports(self, reports: Sequence[events.Report]) -> None:
        self._sink.reports(reports)

    def detached(
        self, address: ChannelAddress, wake: Callable[[], None], task_0: tuple[str, Call] | None
    ) -> None:
        self._unreached = address
        if self._journal is None:
            sources: list[JournalSource] = []
            if self._plan.folder:
                sources.append(open_folder(self._plan.folder))
            if task_0 is not None:
                sources.append(CalledFolder(*task_0, self._limits))
            self._journal = JournalReader(self._plan, sources, wake, limits=self._limits)

    def say_detached(self) -> None:
        source = None if self._journal is None else self._journal.source
        if self._unreached is not None and self._said != (source,):
            self._said = (source,)
            folder = "" if self._archive is None else self._archive.chosen
            self._sink.notice(_detached_notice(self._unreached, source, folder))

    def idle(self) -> None:
        if self._journal is not None:
            self._replay(self._journal.take())
        self._sink.idle()

    def finish(self, record: Record | None) -> None:
        """Replay the rest of the stand-in's journal, and its record; None without a record."""
        if self._journal is not None:
            self._replay(self._journal.finish(record))
            if record is not None:
                self._replay([record.kept])
            self._journal = None

    def _replay(self, files: Iterable[Sequence[Kept]]) -> None:
        for kept in files:
            self.say_detached()
            for rank, several in groupby(kept, _reporter):
                if rank is not None:
                    self._sink.reports(cast("list[events.Report]", list(several)))
                    continue
                for event in several:
                    self._take_kept(event)

    def _take_kept(self, event: Kept) -> None:
        if isinstance(event, events.RanksPlaced):
            self._sink.tell(event)
            return
        try:
            self.take(event)
        except CheckpointError as error:  # a checkpoint that is required: the stand-in ends the run
            self.problem = self.problem or error
        except ValueError:
            pass  # others may write to the folder, too

    def take(self, message: Content | DriverEvent) -> messages.Fetched | None:
        """See :class:`Observer`.

        A checkpoint that cannot be written ends the training only if it is required.
        """
        match message:
            case messages.Fetch():
                if self._archive is None:
                    return no_archive(message)
                return self._archive.fetch(message)
            case messages.FilePart():
                self._take_part(message)
            case events.Saved():
                self._take_saved(message)
            case events.Unsaved():
                self._warn_unsaved(f"the checkpoint of step {message.step}", message.reason)
            case events.Untraced():
                self._warn_untraced(message.rank, message.reason)
            case events.RanksPlaced():
                self._take_ranks(message)
            case _:
                self._sink.tell(message)
        return None

    def _take_ranks(self, placed: events.RanksPlaced) -> None:
        if self._journal is not None:  # the tasks reach this process after all
            self._journal.finish(None)
            self._journal = None
        self._sink.tell(placed)

    def _take_part(self, message: messages.FilePart) -> None:
        if messages.is_trace(message):
            self._take_trace(message)
            return
        if self._archive is None:
            return
        try:
            timeline = self._archive.part(message)
        except OSError as error:
            if message.name == "timeline":
                why = describe(error, folder=self._archive.timeline_folder, full=_FULL_TIMELINE)
                self._sink.notice(f"Horovod's timeline could not be written: {why}")
            else:
                self._warn_unsaved(message.name, self._archive.why(error))
            return
        if timeline is not None:
            self._sink.notice(f"Horovod's timeline: {timeline}")
            self._sink.tell(events.TraceWritten(TraceFile(0, "horovod", str(timeline))))

    def _take_trace(self, message: messages.FilePart) -> None:
        try:
            trace = self._traces.part(message)
        except OSError as error:
            self._warn_untraced(message.rank, str(error))
            return
        if trace is not None:
            if self._traces.count == 1:
                names = trace.path.replace(f"-rank-{trace.rank}.", "-rank-*.")
                kind = "TensorFlow" if trace.kind == "tensorflow" else trace.kind
                self._sink.notice(
                    f"traces of {kind}'s profiler, of steps {FIRST_STEP} to {LAST_STEP}: {names}"
                )
            self._sink.tell(events.TraceWritten(trace))

    def _warn_untraced(self, rank: int, why: str) -> None:
        if not self._untraced:  # the reason is often the same on all ranks
            self._untraced = True
            self._sink.notice(f"torch_profiler: rank {rank} has sent no trace. {why}")

    def _take_saved(self, message: events.Saved) -> None:
        if self._archive is None:
            return
        try:
            saved = self._archive.saved(message.marker)
        except (CheckpointError, OSError) as error:
            step = message.marker.step
            self._warn_unsaved(f"the checkpoint of step {step}", self._archive.why(error))
            return
        if saved is not None:
            self._sink.tell(events.CheckpointKept(saved.folder, saved.marker))
            warning = self._archive.metric_warning(message.marker)
            if warning:
                self._sink.notice(warning)

    def _warn_unsaved(self, what: str, why: str) -> None:
        if self._archive is not None:
            self._sink.notice(self._archive.unsaved(what, why))


def no_archive(message: messages.Fetch) -> messages.Fetched:
    """The answer where no checkpoint of the driver's machine can be read."""
    problem = (
        "the ranks reach neither the driver nor its folder of checkpoints: set checkpoint_dir to a "
        "folder or URL that driver and executors share."
    )
    return messages.Fetched(message.name, message.offset, problem=problem)


def _reporter(event: Kept) -> int | None:
    """The rank of a report; None for other events."""
    return event.rank if isinstance(event, events.Report) else None


def _detached_notice(address: ChannelAddress, source: JournalSource | None, folder: str) -> str:
    begin = (
        f"executors cannot reach this process at {address.host}:{address.port}. The ranks run in "
        "detached mode: what they print and report "
    )
    if isinstance(source, CalledFolder):
        return f"{begin}comes over a connection from here to {source.url}, a second late."
    if source is not None:
        return f"{begin}comes through files in {source.url}, a second or two late."
    end = (
        f"{begin}is shown at the end of the run, and until then is in the executors' logs. For "
        "live output name a folder or URL that driver and executors share as checkpoint_dir; or "
        "let TCP connections of the executors through, to an address of this machine that they "
        "reach (HOROVOD_RUNNER_DRIVER_HOST)."
    )
    if folder:
        end += (
            f" Nothing has come through checkpoint_dir={folder!r} so far: perhaps the executors do "
            "not see it, or lack fsspec's package or the credentials."
        )
    return end
