"""Writes a run as TensorBoard event files, readable while the run goes on."""

from __future__ import annotations

import itertools
import os
import socket
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.host.folders.folder import local_path
from horovod_runner.sinks.summary import MeasuringSink

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.wire.events import Report

_COLUMNS: Final = 120
# Values of a metric: every second one is left out from here on, and twice as many each time their
# number has doubled. TensorBoard itself shows a thousand.
_MANY: Final = 1 << 20
_MOST_NAMES: Final = 1 << 12  # of metrics whose values are counted
_PROFILE: Final = "profile"  # the folder of what the run measures of itself
_file_numbers = itertools.count()


class TensorBoardSink(MeasuringSink):
    """Writes a run as TensorBoard's event files, without TensorFlow.

        HorovodRunner(np=4, sinks=[TensorBoardSink("runs/first")]).run(main)

    ``tensorboard --logdir runs`` shows it. Metrics are indexed by step, or by the count of the
    rank's reports if none has a step. The epoch is logged as a metric. Metrics of ranks other than
    0 (``report_ranks="all"``) go to the folders ``rank1``, ``rank2`` and so on: TensorBoard draws
    the ranks into one chart. The run's parameters become a text.

    What the run measures of itself goes to the folder ``profile`` every ten seconds, indexed by the
    steps of rank 0: where a step's milliseconds go, ``profile/rank0/compute_ms``, and the machine,
    ``system/rank0/cpu_utilization_percentage``. Other ranks are in ``min``, ``median`` and ``max``
    in place of ``rank0``. At the end the diagnosis becomes the text ``profile/diagnosis``.

    Of a metric with more than a million values only every second one is written from there on, and
    of more than two million every fourth, and so on. At the end a text, ``left_out``, says how many
    are missing. ``last_run.metrics`` is thinned out likewise.

    Steps that are repeated, after a restart or by another run in the same folder, replace the
    earlier ones.

    Args:
        log_dir: a folder on this machine; created if it does not exist.
        log_profile: whether to write what the run measures of itself.

    Raises:
        ImportError: TensorBoard is not installed.
        ValueError: log_dir is the URL of remote storage.
        OSError: log_dir cannot be created.
    """

    def __init__(self, log_dir: str | os.PathLike[str], log_profile: bool = True) -> None:
        try:
            # Not tensorboard.summary.Writer: it imports TensorFlow if installed, which takes long.
            from tensorboard.compat.proto import event_pb2  # noqa: F401
            from tensorboard.summary.writer import record_writer  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "TensorBoardSink writes with TensorBoard: pip install 'horovod_runner[tensorboard]'"
            ) from error
        folder = local_path(os.fspath(log_dir))
        if folder is None:
            raise ValueError(
                f"log_dir={log_dir!r} is remote storage. Event files are appended to, which remote "
                "storage cannot do. Set log_dir to a folder on this machine or to a mounted one."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.absolute()
        super().__init__(log_profile)

    def begin(self, run: Run) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`, like all methods below."""
        super().begin(run)
        self._files: dict[str, _EventFile] = {}
        self._params = _markdown_table(run)

    def attempt(self, number: int) -> None:
        for file in self._files.values():
            file.restarted = True

    def report(self, report: Report) -> None:
        rank = report.rank
        step = self._steps[rank].step_of(report)
        numbers = dict(report.metrics)
        if report.epoch is not None:
            numbers["epoch"] = report.epoch
        self._file(f"rank{rank}" if rank else "").scalars(numbers, step, report.time)
        self._flush_if_due()

    def _write_summary(self) -> None:
        if numbers := self._summary.take():
            self._file(_PROFILE).scalars(numbers, self._summary.steps, time.time())

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def end(self, run: Run) -> None:
        if self._summary.has_any:
            self._write_summary()
            found = _code_block(str(run.diagnose()))
            self._file(_PROFILE).text("profile/diagnosis", found, self._summary.steps, time.time())
        for file in self._files.values():
            file.close()

    def _file(self, folder: str) -> _EventFile:
        """The file in a folder inside log_dir; "" is log_dir itself."""
        file = self._files.get(folder)
        if file is None:
            params = "" if folder else self._params
            file = self._files[folder] = _EventFile(self._folder / folder, params)
        return file


class _EventFile:
    """One event file, in the format "brain.Event:2".

    Args:
        params: the run's parameters as Markdown; empty to write none.

    Attributes:
        restarted: whether the next event may have a lower step than the last one.
    """

    def __init__(self, folder: Path, params: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._path = folder / f"events.out.tfevents.{name}"
        self._writer: Any = RecordWriter(self._path.open("wb"))
        self._params = params
        self._counts: dict[str, int] = {}  # of values, by the name of the metric
        self._left_out = self._step = 0
        self.restarted = True
        self._write(wall_time=time.time(), file_version="brain.Event:2")
        self.flush()

    def scalars(self, numbers: dict[str, float | int], step: int, when: float) -> None:
        """Append the metrics of a step; ``when`` is in seconds since the epoch."""
        wanted = {name: number for name, number in numbers.items() if self._wants(name)}
        self._left_out += len(numbers) - len(wanted)
        self._step = step
        if numbers and not wanted:
            return
        if self.restarted:
            # TensorBoard then discards earlier events of this step and of later ones.
            log = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
            self._write(wall_time=when, step=step, session_log=log)
            if self._params:
                self.text("params", self._params, step, when)
            self.restarted = False
        value = self._summary_pb2.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in wanted.items()]
        self._summary(values, step, when)

    def _wants(self, name: str) -> bool:
        """Count a value of a metric; returns whether to write it."""
        if name not in self._counts and len(self._counts) >= _MOST_NAMES:
            return True
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return count % (1 << (count // _MANY).bit_length()) == 0

    def text(self, tag: str, markdown: str, step: int, when: float) -> None:
        """Append a text; ``when`` is in seconds since the epoch."""
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        )
        metadata = self._summary_pb2.SummaryMetadata
        described = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        value = self._summary_pb2.Summary.Value(tag=tag, metadata=described, tensor=tensor)
        self._summary([value], step, when)

    def _summary(self, values: list[Any], step: int, when: float) -> None:
        summary = self._summary_pb2.Summary(value=values)
        self._write(wall_time=when, step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        with self._named():
            self._writer.write(self._event_pb2.Event(**fields).SerializeToString())

    def flush(self) -> None:
        """Make all events visible to readers."""
        with self._named():
            self._writer.flush()

    def close(self) -> None:
        """Say how many values are left out, if any, and close the file."""
        if self._left_out:
            text = f"{self._left_out:,} values are left out: a metric has more than {_MANY:,}."
            self.text("left_out", text, self._step, time.time())
        with self._named():
            self._writer.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have an error of a write name the file."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


def _code_block(text: str) -> str:
    """Text that Markdown shows as it is, but in lines that need no scrolling."""
    lines = (textwrap.wrap(line, _COLUMNS, subsequent_indent="     ") for line in text.splitlines())
    return textwrap.indent("\n".join(part for parts in lines for part in parts), "    ")


def _markdown_table(run: Run) -> str:
    def cell(value: object) -> str:
        return str(value).replace("|", "\\|").replace("\n", " ")

    rows = [f"| {cell(name)} | {cell(value)} |" for name, value in run.params.items()]
    return "\n".join(["| param | value |", "|---|---|", *rows])
