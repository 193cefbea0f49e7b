"""Writes a run as event files, which TensorBoard shows while it goes on."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.sinks import TOTAL, Sink, Steps
from horovod_runner.stores import local_path

if TYPE_CHECKING:
    from horovod_runner.messages import Report
    from horovod_runner.result import Run

_FLUSH_SECONDS: Final = 1.0
_numbers = itertools.count()


class TensorBoardSink(Sink):
    """Writes a run as TensorBoard's event files, without TensorFlow.

        HorovodRunner(np=4, sinks=[TensorBoardSink("runs/first")]).run(main)

    and ``tensorboard --logdir runs`` shows it. Metrics go by step, or by the count of the rank's
    reports where none has a step; the epoch is one of them. Those of other ranks than 0
    (``report_ranks="all"``) are in folders ``rank1``, ``rank2`` and so on, so TensorBoard draws the
    ranks into one picture. The run's params are a text.

    After a restart, and when another run writes to the same folder, steps that come a second time
    take the place of the first ones.

    Args:
        log_dir: a folder of this machine; is made.

    Raises:
        ImportError: TensorBoard is not installed.
        ValueError: log_dir is the URL of a store.
        OSError: log_dir cannot be made.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            # Not tensorboard.summary.Writer: that imports TensorFlow, if there is one, for long.
            from tensorboard.compat.proto import event_pb2  # noqa: F401
            from tensorboard.summary.writer import record_writer  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "TensorBoardSink writes with TensorBoard: pip install 'horovod_runner[tensorboard]'"
            ) from error
        folder = local_path(os.fspath(log_dir))
        if folder is None:
            raise ValueError(
                f"log_dir={log_dir!r}: event files grow line by line, which stores cannot do. Name "
                "a folder of this machine, or one that is mounted on it."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.absolute()

    def begin(self, run: Run) -> None:
        """See :class:`~horovod_runner.sinks.Sink`; so for all below."""
        self._files: dict[int, _EventFile] = {}
        self._steps: defaultdict[int, Steps] = defaultdict(Steps)
        self._flushed_at = time.monotonic()
        self._params = _table(run)

    def attempt(self, number: int) -> None:
        for file in self._files.values():
            file.restarted = True

    def report(self, report: Report) -> None:
        rank = report.rank
        step = self._steps[rank].of(report)
        numbers = {name: value for name, value in report.metrics.items() if name != TOTAL}
        if report.epoch is not None:
            numbers["epoch"] = report.epoch
        self._file(rank).scalars(numbers, step, report.time)
        if time.monotonic() - self._flushed_at >= _FLUSH_SECONDS:
            self.idle()

    def idle(self) -> None:
        for file in self._files.values():
            file.flush()
        self._flushed_at = time.monotonic()

    def end(self, run: Run) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, rank: int) -> _EventFile:
        found = self._files.get(rank)
        if found is None:
            folder = self._folder / f"rank{rank}" if rank else self._folder
            found = self._files[rank] = _EventFile(folder, "" if rank else self._params)
        return found


class _EventFile:
    """One event file, in the format "brain.Event:2".

    Args:
        folder: where; is made.
        params: a text in Markdown.

    Attributes:
        restarted: steps may go back with the next event.
    """

    def __init__(self, folder: Path, params: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names.
        name = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._writer: Any = RecordWriter((folder / f"events.out.tfevents.{name}").open("xb"))
        self._params = params
        self.restarted = True
        self._write(wall_time=time.time(), file_version="brain.Event:2")
        self.flush()

    def scalars(self, numbers: dict[str, float | int], step: int, when: float) -> None:
        """Add the metrics of a step."""
        if self.restarted:
            # What is there of this and later steps counts no more.
            log = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
            self._write(wall_time=when, step=step, session_log=log)
            if self._params:
                self._summary([self._text("params", self._params)], step, when)
            self.restarted = False
        value = self._summary_pb2.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._summary(values, step, when)

    def _text(self, tag: str, markdown: str) -> Any:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        )
        metadata = self._summary_pb2.SummaryMetadata
        described = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        return self._summary_pb2.Summary.Value(tag=tag, metadata=described, tensor=tensor)

    def _summary(self, values: list[Any], step: int, when: float) -> None:
        summary = self._summary_pb2.Summary(value=values)
        self._write(wall_time=when, step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event_pb2.Event(**fields).SerializeToString())

    def flush(self) -> None:
        """Let readers see what there is."""
        self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


def _table(run: Run) -> str:
    def cell(value: object) -> str:
        return str(value).replace("|", "\\|").replace("\n", " ")

    rows = [f"| {cell(name)} | {cell(value)} |" for name, value in run.params.items()]
    return "\n".join(["| param | value |", "|---|---|", *rows])
