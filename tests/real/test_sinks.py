"""Sinks: MLflow, TensorBoard, custom ones, and the progress bar in terminals and notebooks."""

from __future__ import annotations

import csv
import fcntl
import math
import os
import pty
import re
import struct
import sys
import termios
import textwrap
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner import (
    CancelledError,
    DebugConfig,
    HorovodRunner,
    Limits,
    current_attempt,
    report,
    save_checkpoint,
)
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunLog
from horovod_runner.sinks import Sink, summary
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.sinks.mlflow import MLflowSink
from horovod_runner.sinks.tensorboard import TensorBoardSink
from horovod_runner.task import machine
from horovod_runner.wire.events import CheckpointKept, Report
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.measurements import Machine, Profile
from tests.programs import ROOT, Program, run_python


def train(steps: int, rate: float = 0.1) -> str:
    for step in range(1, steps + 1):
        report(loss=1 / step, total_steps=steps, step=step, epoch=step // 10)
    return "done"


def history(mlflow: Any, run_id: str | None, name: str) -> list[tuple[int, float]]:
    points = mlflow.MlflowClient().get_metric_history(run_id, name)
    return [(point.step, point.value) for point in points]


@pytest.mark.usefixtures("nothing_left")
def test_mlflow_receives_params_metrics_checkpoints_and_status(mlflow: Any) -> None:
    def main(steps: int, note: str) -> None:
        for step in range(1, steps + 1):
            report(loss=1 / step, total_steps=steps, step=step, epoch=step // 2)
        report(accuracy=math.nan, **{"top-5 (%)": math.inf})
        save_checkpoint({"weights": note}, steps, {"loss": 1 / steps})

    sink = MLflowSink(experiment="digits", run_name="first")
    runner = HorovodRunner(np=-2, sinks=[sink], debug_config=DebugConfig(report_ranks="all"))
    runner.run(main, steps=4, note="long")
    client, checkpoint = mlflow.MlflowClient(), runner.last_run.latest_checkpoint
    logged = client.get_run(sink.run_id)
    assert client.get_experiment(logged.info.experiment_id).name == "digits"
    assert (logged.info.run_name, logged.info.status) == ("first", "FINISHED")
    assert logged.data.params == {"np": "-2", "steps": "4", "note": "long"}
    assert logged.data.tags["horovod_runner.run_id"] == runner.last_run.run_id
    losses = [(step, 1 / step) for step in range(1, 5)]
    assert history(mlflow, sink.run_id, "loss") == losses
    assert history(mlflow, sink.run_id, "rank1/loss") == losses
    assert history(mlflow, sink.run_id, "epoch") == [(1, 0), (2, 1), (4, 2)]
    assert history(mlflow, sink.run_id, "top-5 ___") == [(4, math.inf)]
    ((step, value),) = history(mlflow, sink.run_id, "accuracy")
    assert step == 4
    assert math.isnan(value)
    assert "total_steps" not in logged.data.metrics
    assert "total_steps" not in runner.last_run.metrics.column_names
    (artifact,) = client.list_artifacts(sink.run_id, "checkpoints")
    copy = Path(client.download_artifacts(sink.run_id, artifact.path))
    assert copy.read_bytes() == Path(checkpoint.path).read_bytes()


@pytest.mark.usefixtures("nothing_left")
def test_mlflow_status_of_a_failed_and_of_a_cancelled_run(mlflow: Any) -> None:
    def fail() -> None:
        raise ValueError("no good")

    def wait() -> None:
        report(loss=1.0)
        threading.Event().wait()

    class CancelAtReport(Sink):
        def report(self, report: Any) -> None:
            runner.cancel()

    sink = MLflowSink()
    with pytest.raises(ValueError, match="no good"):
        HorovodRunner(np=-1, sinks=[sink]).run(fail)
    client, failed = mlflow.MlflowClient(), sink.run_id
    runner = HorovodRunner(np=-1, sinks=[sink, CancelAtReport()])
    with pytest.raises(CancelledError):
        runner.run(wait)
    assert client.get_run(failed).info.status == "FAILED"
    assert client.get_run(sink.run_id).info.status == "KILLED"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("background", [False, True])
def test_mlflow_uses_the_active_run_and_leaves_it_open(mlflow: Any, background: bool) -> None:
    sink = MLflowSink()
    with mlflow.start_run() as active:
        mlflow.log_param("steps", "set before")
        runner = HorovodRunner(np=-1, sinks=[sink])
        if background:
            runner.start(train, steps=3).result()
        else:
            runner.run(train, steps=3)
        assert sink.run_id == active.info.run_id
        logged = mlflow.MlflowClient().get_run(sink.run_id)
        assert logged.info.status == "RUNNING"
        assert logged.data.tags["horovod_runner.status"] == "finished"
        assert logged.data.params == {"steps": "set before", "np": "-1"}
        mlflow.log_metric("afterwards", 1.0)
    assert len(history(mlflow, sink.run_id, "loss")) == 3


@pytest.mark.usefixtures("nothing_left")
def test_several_runs_at_once_share_no_sink(mlflow: Any, tmp_path: Path) -> None:
    meeting, logs = tmp_path / "meeting", tmp_path / "logs"
    os.mkfifo(meeting)

    def main(number: int) -> None:
        report(loss=number, step=1)
        with meeting.open("wb" if number else "rb"):  # waits until the other run is here, too
            report(loss=number, step=2)

    sink = MLflowSink()
    runner = HorovodRunner(np=-1, sinks=[sink, TensorBoardSink(logs, log_profile=False)])
    handles = [runner.start(main, number=number) for number in (0, 1)]
    for handle in handles:
        handle.result()
    runs = {each.data.params["number"]: each for each in mlflow.search_runs(output_format="list")}
    assert [runs[name].info.status for name in "01"] == ["FINISHED", "FINISHED"]
    for name, handle in zip("01", handles, strict=True):
        assert handle.run is not None
        assert runs[name].data.tags["horovod_runner.run_id"] == handle.run.run_id
        losses = history(mlflow, runs[name].info.run_id, "loss")
        assert losses == [(1, float(name)), (2, float(name))]
    assert sink.run_id in {each.info.run_id for each in runs.values()}
    written = [
        [point.value for point in read_events(each).Scalars("loss")] for each in logs.iterdir()
    ]
    assert sorted(written) == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.usefixtures("nothing_left")
def test_mlflow_receives_reports_while_main_does_not_report(mlflow: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    os.mkfifo(seen)

    class WatchedSink(MLflowSink):
        def idle(self) -> None:
            super().idle()
            if history(mlflow, self.run_id, "loss") == [(1, 0.5), (2, 0.25)]:
                seen.write_bytes(b"x")

    def main() -> None:
        report(loss=0.5)
        report(loss=0.25)
        seen.read_bytes()  # wait until the store has both

    HorovodRunner(np=-1, sinks=[WatchedSink()]).run(main)


def test_an_invalid_tracking_uri_is_refused_before_the_launch(mlflow: Any) -> None:
    with pytest.raises(ValueError, match=r"nonsense://server: .*tracking_uri") as caught:
        MLflowSink("nonsense://server")
    assert isinstance(caught.value.__cause__, mlflow.MlflowException)


def read_events(folder: Path) -> Any:
    """Read a folder with TensorBoard's reader."""
    # Keeps the reader from importing TensorFlow, which takes half a minute.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


@pytest.mark.usefixtures("nothing_left")
def test_tensorboard_shows_repeated_steps_of_a_restart_once(tmp_path: Path) -> None:
    def main() -> None:
        attempt = current_attempt()
        for step in range(1, 7) if attempt == 1 else range(4, 9):
            report(attempt_of=attempt, step=step)
        if attempt == 1:
            raise ValueError("no good")

    HorovodRunner(np=-1, sinks=[TensorBoardSink(tmp_path)], max_restarts=1).run(main)
    points = read_events(tmp_path).Scalars("attempt_of")
    assert [point.step for point in points] == list(range(1, 9))
    assert [point.value for point in points] == [1] * 3 + [2] * 5


def test_event_files_are_written_without_a_framework(tmp_path: Path) -> None:
    script = """
        import sys
        from types import SimpleNamespace
        from horovod_runner.wire.events import Report
        from horovod_runner.sinks.tensorboard import TensorBoardSink

        run = SimpleNamespace(params={"np": 1})
        sink = TensorBoardSink(sys.argv[1])
        sink.begin(run)
        sink.report(Report(0, {"loss": 0.5}))
        sink.end(run)
        print([name for name in ("tensorflow", "torch") if name in sys.modules])
    """
    done = run_python(script, tmp_path, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
    assert [point.value for point in read_events(tmp_path).Scalars("loss")] == [0.5]


def test_event_files_cannot_be_in_remote_storage() -> None:
    with pytest.raises(ValueError, match="log_dir='s3://bucket/runs' "):
        TensorBoardSink("s3://bucket/runs")


@pytest.mark.parametrize(
    ("module", "sink", "extra"),
    [("mlflow", MLflowSink, "mlflow"), ("tensorboard", TensorBoardSink, "tensorboard")],
)
def test_a_sink_whose_package_is_missing_names_the_extra(
    module: str, sink: Any, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'horovod_runner\[{extra}\]'"):
        sink(tmp_path)


@pytest.mark.usefixtures("nothing_left")
def test_a_custom_sink_needs_no_base_class(tmp_path: Path) -> None:
    class CsvSink:
        def begin(self, run: Any) -> None:
            self.file = (tmp_path / f"{run.params['steps']}.csv").open("w")
            self.writer = csv.writer(self.file)

        def report(self, report: Any) -> None:
            self.writer.writerow([report.step, report.metrics["loss"]])

        def end(self, run: Any) -> None:
            self.writer.writerow([run.status, ""])
            self.file.close()

    sink: Any = CsvSink()
    HorovodRunner(np=-1, sinks=[sink]).run(train, steps=2)
    assert (tmp_path / "2.csv").read_text().split() == ["1,1.0", "2,0.5", "finished,"]


@pytest.mark.usefixtures("nothing_left")
def test_a_sink_that_raises_causes_one_notice_and_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("no server")

    events = ("prepare", "begin", "report", "end")
    failing = [type(f"At{event.title()}", (Sink,), {event: fail})() for event in events]
    assert HorovodRunner(np=-1, sinks=failing).run(train, steps=5) == "done"
    err = capsys.readouterr().err
    for event in events:
        notice = f"the sink At{event.title()} failed in {event}() and receives nothing more of this"
        assert err.count(f"{notice} run: ConnectionError: no server") == 1


def test_a_sink_that_is_far_behind_loses_reports_but_not_the_end() -> None:
    busy, resume, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[str] = []

    class Busy(Sink):
        def report(self, report: Any) -> None:
            seen.append("report")
            busy.set()
            resume.wait()

        def checkpoint(self, checkpoint: Any) -> None:
            seen.append("checkpoint")

        def end(self, run: Any) -> None:
            ended.set()

    notices: list[str] = []
    run, reported = Run("test", 1), [Report(0, {"loss": 1.0})]
    limits = Limits(sinks=0.001, sink_rest=0.001)
    sink = FanOut(RunLog(run), [], [Busy()], notices.append, limits=limits)
    sink.reports(reported)
    assert busy.wait(60)
    sink.reports(reported)
    name = "checkpoint-000001-step-3-1a2b.bin"
    sink.tell(CheckpointKept("folder", Marker(name, 1, 3, "bytes", 5, "00", "1a2b", 1, 9.0)))
    sink.reports(reported)
    sink.end(run)
    sink.close()
    resume.set()
    assert ended.wait(60)
    assert seen == ["report", "checkpoint"]
    assert "the end of the run: 2 reports and lines are dropped" in notices[0]


@pytest.mark.usefixtures("nothing_left")
def test_mlflow_and_tensorboard_receive_what_the_run_measures_of_itself(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No argument reaches the task of a run. At its own pace the first measurement would come after
    # five seconds, and the diagnosis would be that of a rank that waits.
    monkeypatch.setattr(machine, "_SECONDS", 0.1)
    monkeypatch.setattr(machine, "_LATER_SECONDS", 0.0)
    measured = [tmp_path / "measured0", tmp_path / "measured1"]
    for path in measured:
        os.mkfifo(path)

    class Measured(Sink):
        def machine(self, machine: Any) -> None:
            if (path := measured[machine.rank]).exists():
                path.write_bytes(b"x")
                path.unlink()

    def main() -> None:
        train(steps=50)
        measured[int(os.environ["HOROVOD_RANK"])].read_bytes()  # wait until the driver has it

    sinks = [MLflowSink(), TensorBoardSink(tmp_path / "logs"), Measured()]
    runner = HorovodRunner(np=-2, sinks=sinks, debug_config=DebugConfig(report_ranks="all"))
    runner.run(main)
    run, client = runner.last_run, mlflow.MlflowClient()
    events = read_events(tmp_path / "logs" / "profile")
    for name in ("profile/rank0/step_ms", "profile/max/compute_ms"):
        ((step, value),) = history(mlflow, sinks[0].run_id, name)
        assert step == 50
        assert value > 0
        assert events.Scalars(name)[-1].value > 0
    names = {"cpu_utilization_percentage", "system_memory_usage_percentage"}
    logged = client.get_run(sinks[0].run_id).data.metrics
    for name in names | {"process_memory_megabytes", "network_receive_megabytes"}:
        assert f"system/rank0/{name}" in logged
        assert f"system/median/{name}" in events.Tags()["scalars"]
    folder = Path(client.download_artifacts(sinks[0].run_id, "profile"))
    files = {"diagnosis.txt", "steps.parquet", "machines.parquet", "flame_rank0.svg"}
    assert {path.name for path in folder.iterdir()} >= files
    assert (folder / "diagnosis.txt").read_text() == f"{run.diagnose()}\n"
    (text,) = events.Tensors("profile/diagnosis")
    shown = textwrap.dedent(text.tensor_proto.string_val[0].decode())
    assert shown.splitlines()[0] == str(run.diagnose()).splitlines()[0]


def test_what_sinks_get_has_its_step_and_its_time(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_SECONDS", 0.0)  # a summary of each measurement
    sinks = [MLflowSink(), TensorBoardSink(tmp_path / "logs")]
    run = Run("1a2b", 2, {"note": "a|b"}, status="finished", warnings=["one.", "two."])
    reports = [
        # No step is known yet: it is counted.
        Report(0, {"loss": 0.5}, epoch=0, total_steps=9, time=1.5),
        Report(0, {"loss": 0.25}, epoch=0, step=7, time=2.25),
        Report(1, {"loss": 4.0}, step=3, time=2.5),
        Report(0, {"loss": 0.125}, epoch=1, time=-1.0),  # the last step, and a wrong clock
        Report(0, {"accuracy": math.nan}),
    ]
    in_store: Any = SimpleNamespace(path="s3://bucket/checkpoint-000001-step-3-1a2b.pt")
    for sink in sinks:
        sink.prepare()
        sink.begin(run)
        sink.attempt(1)
        sink.attempt(3)
        sink.reports(reports)
        sink.checkpoint(in_store)
        for number in (1, 2):
            sink.profile(Profile(0, 100.0, 1.0, {"optimizer": 10 * number}))
            sink.machine(Machine(0, 100.0, 5.0, memory=number * 1_000_000))
        sink.end(run)
    of_mlflow, of_tensorboard = sinks[0].run_id, read_events(tmp_path / "logs")
    tags = mlflow.MlflowClient().get_run(of_mlflow).data.tags
    expected = {"attempts": "3", "status": "finished", "warnings": "one. two."}
    expected["checkpoint"] = in_store.path  # it is not copied
    assert {name: tags[f"horovod_runner.{name}"] for name in expected} == expected
    assert history(mlflow, of_mlflow, "loss") == [(1, 0.5), (7, 0.25), (7, 0.125)]
    assert history(mlflow, of_mlflow, "epoch") == [(1, 0), (7, 1)]
    assert history(mlflow, of_mlflow, "rank1/loss") == [(3, 4.0)]
    points = mlflow.MlflowClient().get_metric_history(of_mlflow, "loss")
    assert [point.timestamp for point in points] == [1500, 2250, 0]
    assert history(mlflow, of_mlflow, "profile/rank0/step_ms") == [(10, 100.0), (30, 50.0)]
    memory = "system/rank0/process_memory_megabytes"
    # A summary has the steps of rank 0, or in MLflow, as its own system metrics, a count.
    assert history(mlflow, of_mlflow, memory) == [(1, 1.0), (3, 2.0)]
    points = read_events(tmp_path / "logs" / "profile").Scalars(memory)
    assert [(point.step, point.value) for point in points] == [(10, 1.0), (30, 2.0)]
    (text,) = of_tensorboard.Tensors("params")
    assert rb"| note | a\|b |" in text.tensor_proto.string_val[0]
    assert of_tensorboard.Tags()["scalars"] == ["loss", "epoch", "accuracy"]
    (point,) = of_tensorboard.Scalars("accuracy")
    assert point.step == 7
    assert math.isnan(point.value)
    points = of_tensorboard.Scalars("loss")
    assert [(point.step, point.value) for point in points] == [(1, 0.5), (7, 0.25), (7, 0.125)]
    assert [point.wall_time for point in points] == [1.5, 2.25, -1.0]
    assert [point.value for point in of_tensorboard.Scalars("epoch")] == [0, 0, 1]
    (point,) = read_events(tmp_path / "logs" / "rank1").Scalars("loss")
    assert (point.step, point.value) == (3, 4.0)


def test_sinks_can_leave_the_profile_out(mlflow: Any, tmp_path: Path) -> None:
    sinks = [MLflowSink(log_profile=False), TensorBoardSink(tmp_path / "logs", log_profile=False)]
    HorovodRunner(np=-1, sinks=sinks).run(train, steps=50)
    client = mlflow.MlflowClient()
    assert set(client.get_run(sinks[0].run_id).data.metrics) == {"loss", "epoch"}
    assert client.list_artifacts(sinks[0].run_id) == []
    assert not (tmp_path / "logs" / "profile").exists()


# The progress bar.


def test_without_a_terminal_progress_is_printed_as_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = tmp_path / "shown"
    os.mkfifo(shown)

    class Shown(Sink):
        def report(self, report: Any) -> None:
            if report.step == 0:
                shown.write_bytes(b"x")

    def main() -> None:
        report(loss=2.0, total_steps=20, step=0, epoch=0)
        shown.read_bytes()  # wait until the driver has the report
        train(steps=20)

    HorovodRunner(np=-1, sinks=[Shown()]).run(main)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "HorovodRunner: epoch 0, step 0/20, loss=2"
    assert last.startswith("HorovodRunner: epoch 2, step 20/20, ")
    assert last.endswith(" steps/s, loss=0.05")


_WATCHED = """
import sys
from horovod_runner import HorovodRunner, current_attempt, log_to_driver, report

def main(way):
    for step in range(20):
        report(loss=1 / (step + 1), total_steps=20, step=step)
        if step % 10 == 0:
            log_to_driver(f"at step {step}")
        if way == "prints":
            print(step, end=" ", flush=True)
        if way == "restarts" and step == 12 and current_attempt() == 1:
            raise ValueError("no good")

HorovodRunner(np=-1, max_restarts=1).run(main, way=sys.argv[1])
print("after")
"""


def on_screen(written: str) -> list[str]:
    """The lines that a terminal shows, some of which are overwritten."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            text = part.removeprefix("\x1b[K")
            shown = text + ("" if text != part else shown[len(text) :])
        lines.append(shown.rstrip())
    return lines


def watch(way: str, folder: Path, columns: int = 100) -> list[str]:
    """Run the script in a terminal; returns the lines that are shown at the end."""
    script = folder / "watched.py"
    script.write_text(_WATCHED)
    terminal, child = pty.openpty()
    fcntl.ioctl(
        terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0)
    )
    command = [sys.executable, str(script), way]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Program(command, stdin=child, stdout=child, stderr=child, env=env) as process:
        os.close(child)
        written = b""
        try:
            while piece := os.read(terminal, 1 << 16):
                written += piece
        except OSError:  # raised at the end of a terminal
            pass
        finally:
            os.close(terminal)
    assert process.returncode == 0, written.decode()
    return on_screen(written.decode())


def test_a_terminal_shows_a_bar_below_all_lines_and_keeps_it(tmp_path: Path) -> None:
    *lines, bar, after, end = watch("reports", tmp_path)
    assert lines == ["at step 0", "at step 10"]
    assert bar.startswith("100%|███")
    assert "| 20/20 [" in bar
    assert bar.endswith("step/s, loss=0.05]")
    assert (after, end) == ("after", "")


def test_the_bar_shows_a_restart(tmp_path: Path) -> None:
    *lines, bar, _, _ = watch("restarts", tmp_path)
    assert [line for line in lines if line.startswith("at")] == ["at step 0", "at step 10"] * 2
    assert any(line.startswith("HorovodRunner: attempt 1 failed: ") for line in lines)
    assert bar.startswith("attempt 2: 100%|███")


def test_the_bar_does_not_overwrite_an_unfinished_line(tmp_path: Path) -> None:
    *lines, bar, _, _ = watch("prints", tmp_path)
    printed = re.sub(r"at step \d+", " ", " ".join(lines)).split()
    assert printed == [str(step) for step in range(20)]
    assert bar.startswith("100%|███")


def test_a_terminal_without_a_size_shows_lines(tmp_path: Path) -> None:
    lines = watch("reports", tmp_path, columns=0)
    assert re.fullmatch(r"HorovodRunner: step 20/20, (.* steps/s, )?loss=0.05", lines[-3])


_CELLS = [
    """
from horovod_runner import HorovodRunner, report
from horovod_runner.run import handle
from horovod_runner.results.panel import Panel

handle.progress_sink = lambda: Panel(first_seconds=0)  # these runs are short

def main(steps, total):
    for step in range(1, steps + 1):
        report(loss=1 / step, total_steps=total, step=step)
    assert steps < 10
""",
    "HorovodRunner(np=-1).run(main, steps=5, total=5)",
    "HorovodRunner(np=-1).run(main, steps=5, total=1000)  # ends early, without an error",
    "HorovodRunner(np=-1).run(main, steps=10, total=10)",
    "HorovodRunner(np=-1).start(main, steps=5, total=5).result()  # in a thread",
    "HorovodRunner(np=-1, progress=False).run(main, steps=5, total=5)",
    """
def deeper(depth):
    return deepest(depth - 1)

def deepest(depth):
    return deeper(depth) if depth else {}["label"]

runner = HorovodRunner(np=-1, progress=False)
runner.run(deeper, depth=20)
""",
    "runner.last_run",
]


def test_a_notebook_keeps_a_panel_as_html_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient
    import nbformat

    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in _CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", allow_errors=True, resources=resources
    )
    client.execute()
    shown = []
    for cell in notebook.cells[1:-3]:
        (panel,) = [out.data for out in cell.outputs if out.output_type == "display_data"]
        assert set(panel) == {"text/html", "text/plain"}
        title, *rest = panel["text/plain"].splitlines()
        (pace,) = (line for line in rest if line.startswith("step"))
        shown.append((title.split(", ")[0], pace))
        assert pace in panel["text/html"]
        # Nobody knows whether someone will look at it in a browser.
        lines = "".join(out.text for out in cell.outputs if out.output_type == "stream")
        assert f"HorovodRunner: {pace.partition(' of')[0]}/" in lines
    assert shown == [
        ("main: finished", "step 5 of 5 (100%)"),
        ("main: finished", "step 5 of 1,000 (0%)"),
        ("main: failed", "step 10 of 10 (100%)"),
        ("main: finished", "step 5 of 5 (100%)"),
    ]
    assert notebook.cells[-3].outputs == []
    whole, error = notebook.cells[-2].outputs
    assert "<details><summary>the whole error" in whole.data["text/html"]
    assert whole.data["text/html"].count("in deeper") == 20
    traceback = "\n".join(error.traceback)
    assert "lines are folded: see the whole error above" in traceback
    assert "runner.run(deeper, depth=20)" in re.sub(r"\x1b\[[\d;]*m", "", traceback)
    assert "handle.py" not in traceback  # frames of this package tell a user nothing
    (card,) = notebook.cells[-1].outputs
    assert "KeyError: &#39;label&#39;" in card.data["text/html"]
    assert card.data["text/plain"].endswith("; KeyError: 'label'>")
    # Of each panel there was one with widgets, which the HTML replaced.
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    names = [each["model_name"] for each in state.values()]
    assert names.count("VBoxModel") == names.count("AccordionModel") == 4
    heads = [each["state"].get("value", "") for each in state.values()]
    assert len([head for head in heads if "5 of 5" in head and "finished" in head]) == 2
