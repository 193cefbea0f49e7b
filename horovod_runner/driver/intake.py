"""Passes what the ranks send to the sinks and to the checkpoint archive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, assert_never

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.folders.problems import describe
from horovod_runner.profiling.framework_profiler import FIRST_STEP, LAST_STEP
from horovod_runner.results.run import TraceFile
from horovod_runner.results.trace.arrivals import Arrivals
from horovod_runner.sinks import Sink
from horovod_runner.wire import measurements, messages
from horovod_runner.wire.slots import RankInfo

#: What a rank sends that is neither about its life nor for the other ranks.
Content = (
    messages.Output
    | messages.Log
    | messages.Began
    | measurements.Profile
    | measurements.Machine
    | measurements.Lines
    | messages.FilePart
    | messages.Saved
    | messages.Unsaved
    | messages.Untraced
    | messages.Fetch
)
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


class Observer(Protocol):
    """Receives what the ranks send, and what the supervisor has to say."""

    def take(self, message: Content) -> messages.Fetched | None:
        """Receive a rank's message; returns the answer to a Fetch.

        Raises:
            CheckpointError: a checkpoint that is required could not be written.
            ValueError: no rank of this run sends such a message.
        """

    def reports(self, reports: Sequence[messages.Report]) -> None:
        """Receive reports of one rank."""

    def notice(self, text: str) -> None:
        """Receive a text for the user."""

    def controller(self, name: messages.Controller) -> None:
        """Receive what Horovod coordinates with."""

    def ranks(self, ranks: list[RankInfo]) -> None:
        """Receive where the ranks are, once all have started."""

    def idle(self) -> None:
        """Called at least once a second."""


class Intake:
    """The driver's observer.

    Args:
        sink: shows and records.
        archive: takes the checkpoints and the timeline; None where there is no place for them.
        traces: takes the files of frameworks' profilers.
    """

    def __init__(self, sink: Sink, archive: Archive | None, traces: Arrivals) -> None:
        self._sink = sink
        self._archive = archive
        self._traces = traces
        self._untraced = False

    def reports(self, reports: Sequence[messages.Report]) -> None:
        """As in :class:`Observer`, like all methods below."""
        self._sink.reports(reports)

    def notice(self, text: str) -> None:
        self._sink.notice(text)

    def controller(self, name: messages.Controller) -> None:
        self._sink.controller(name)

    def ranks(self, ranks: list[RankInfo]) -> None:
        self._sink.ranks(ranks)

    def idle(self) -> None:
        self._sink.idle()

    def take(self, message: Content) -> messages.Fetched | None:
        """See :class:`Observer`.

        A checkpoint that cannot be written ends the training only if it is required.
        """
        match message:
            case messages.Output():
                self._sink.output(message.rank, message.stream, message.text)
            case messages.Log():
                self._sink.log(message.rank, message.text)
            case messages.Began():
                self._sink.began(message.rank)
            case measurements.Profile():
                self._sink.profile(message)
            case measurements.Machine():
                self._sink.machine(message)
            case measurements.Lines():
                self._sink.lines(message)
            case messages.Fetch():
                return self._fetch(message)
            case messages.FilePart():
                self._take_part(message)
            case messages.Saved():
                self._take_saved(message)
            case messages.Unsaved():
                self._warn_unsaved(f"the checkpoint of step {message.step}", message.reason)
            case messages.Untraced():
                self._warn_untraced(message.rank, message.reason)
            case _:
                assert_never(message)
        return None

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
                self._sink.notice(f"Horovod's timeline could not be written: {describe(error)}")
            else:
                self._warn_unsaved(message.name, describe(error))
            return
        if timeline is not None:
            self._sink.notice(f"Horovod's timeline: {timeline}")
            self._sink.trace(TraceFile(0, "horovod", str(timeline)))

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
            self._sink.trace(trace)

    def _warn_untraced(self, rank: int, why: str) -> None:
        if not self._untraced:  # the reason is often the same on all ranks
            self._untraced = True
            self._sink.notice(f"torch_profiler: rank {rank} has sent no trace. {why}")

    def _take_saved(self, message: messages.Saved) -> None:
        if self._archive is None:
            return
        try:
            saved = self._archive.saved(message.marker)
        except OSError as error:
            step = message.marker.step
            self._warn_unsaved(f"the checkpoint of step {step}", describe(error))
            return
        if saved is not None:
            self._sink.checkpoint(saved)
            warning = self._archive.metric_warning(message.marker)
            if warning:
                self._sink.notice(warning)

    def _warn_unsaved(self, what: str, why: str) -> None:
        if self._archive is not None:
            self._sink.notice(self._archive.unsaved(what, why))

    def _fetch(self, message: messages.Fetch) -> messages.Fetched:
        if self._archive is None:
            return no_archive(message)
        return self._archive.fetch(message)


def no_archive(message: messages.Fetch) -> messages.Fetched:
    """The answer where no checkpoint of the driver's machine can be read."""
    problem = (
        "the ranks reach neither the driver nor its folder of checkpoints: set checkpoint_dir to a "
        "folder or URL that driver and executors share."
    )
    return messages.Fetched(message.name, message.offset, problem=problem)
