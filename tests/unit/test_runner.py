"""The public face: arguments, names, what is imported, and running in a plain function."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import subprocess
import sys
from typing import Any

import pytest

import horovod_runner
from horovod_runner import (
    ClusterConfig,
    DataConfig,
    DebugConfig,
    HorovodRunner,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.common.options import STALL_WARN_SECONDS, grouped
from horovod_runner.host.python_path import rank_path
from horovod_runner.results.run import Run
from horovod_runner.sinks import Sink
from horovod_runner.sinks.terminal import TerminalSink


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, TypeError, "np"),
        ({"np": "4"}, TypeError, "^np .*int, .*str;"),
        ({"np": True}, TypeError, "^np .*int, .*bool;"),
        ({"np": 2.0}, TypeError, "^np .*int, .*float;"),
        ({"np": 1, "driver_log_verbosity": "most"}, ValueError, "'all', 'log_callback_only'"),
        ({"np": 1, "gpu_pinning": "none"}, ValueError, "'current', 'mask'"),
        ({"np": 1, "slot_timeout": -1}, ValueError, "slot_timeout .* -1$"),
        ({"np": 1, "gpus_per_rank": 1.5}, ValueError, "gpus_per_rank"),
        ({"np": 1, "gpus_per_rank": -1}, ValueError, "gpus_per_rank"),
        ({"np": 1, "env": {"A": 1}}, TypeError, "^env .*'A' .*int$"),
        ({"np": 1, "resume": True}, ValueError, "^resume=True .*checkpoint_dir"),
        ({"np": 1, "mode": "least"}, ValueError, "'min', 'max'"),
        ({"np": 1, "num_to_keep": 0}, ValueError, "num_to_keep .* 1, .* 0; None"),
        ({"np": 1, "num_to_keep": "3"}, TypeError, "num_to_keep .*int, .*str$"),
        ({"np": 1, "max_restarts": -1}, ValueError, "max_restarts .* 0, .* -1"),
        ({"np": 1, "max_restarts": None}, TypeError, "max_restarts .*int, .*NoneType$"),
        ({"np": 1, "report_ranks": 1}, ValueError, "report_ranks .* 0, 'all', .* 1"),
        ({"np": 1, "sinks": [print]}, TypeError, "^sinks .*function print.* prepare, begin, "),
        ({"np": 1, "sinks": [Sink]}, TypeError, r"sinks=\[Sink\]: .* Sink\(\.\.\.\)"),
        ({"np": 1, "sinks": "mlflow"}, TypeError, r"^sinks .*'mlflow' .*sinks=\[MLflowSink\(\)\]"),
        ({"np": 1, "checkpoint_dir": ""}, ValueError, "checkpoint_dir is empty"),
        ({"np": 1, "checkpoint_dir": 3}, TypeError, "checkpoint_dir .*URL, .*int$"),
        ({"np": 1, "metric": 3}, TypeError, "^metric .*int$"),
        ({"np": 1, "mode": "max"}, ValueError, "mode='max' .*metric='accuracy'"),
        ({"np": 1, "timeline": "/tmp"}, ValueError, "timeline='/tmp' .*folder"),
        ({"np": 1, "timeline": "/no/such/t.json"}, ValueError, "timeline=.* /no/such$"),
        ({"np": 1, "disk_limit": -1}, ValueError, "^disk_limit .* 0, .* -1; .*bytes"),
        ({"np": 1, "disk_limit": 0.5}, TypeError, "^disk_limit .*int, .*float$"),
        ({"np": 1, "disk_limit": "5 GB"}, TypeError, "^disk_limit .*int, .*str$"),
        ({"np": 1, "torch_profiler": 3}, TypeError, "torch_profiler .*True, False .* 3$"),
        ({"np": 1, "torch_profiler": __file__}, ValueError, f"torch_profiler='{__file__}' .*file"),
        ({"np": 1, "torch_profiler": "/no/such/x"}, ValueError, "torch_profiler=.* /no/such$"),
    ],
)
def test_wrong_arguments_are_told_at_once(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        HorovodRunner(**grouped(arguments))


def test_a_number_of_bytes_may_be_written_as_a_float() -> None:
    limit = DataConfig(disk_limit=50e9).disk_limit  # type: ignore[arg-type]
    assert (limit, type(limit)) == (50_000_000_000, int)


def test_a_run_that_never_hangs_may_be_written_as_one_without_end() -> None:
    options = HorovodRunner(np=1, debug_config=DebugConfig(hang_timeout=math.inf)).options
    assert options.debug_config.hang_timeout is None
    assert options.stall_check_seconds == STALL_WARN_SECONDS


def test_modules_and_sinks_may_come_from_a_generator() -> None:
    sink = Sink()
    config = ClusterConfig(ship_modules=(module for module in [math]))  # type: ignore[arg-type]
    runner = HorovodRunner(
        np=1,
        sinks=(each for each in [sink]),  # type: ignore[arg-type]
        cluster_config=config,
    )
    assert runner.options.sinks == (sink,)
    assert runner.options.cluster_config.ship_modules == (math,)


def test_np_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        HorovodRunner(2)  # type: ignore[misc]


def test_main_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"^main .*str: .*run\(train\)"):
        HorovodRunner(np=-1).run("train")  # type: ignore[arg-type]


def test_arguments_that_main_does_not_take_are_refused_before_the_launch() -> None:
    def train(lr: float, epochs: int = 1) -> float:
        return lr * epochs

    @functools.wraps(train)
    def decorated() -> float:
        return train(0.5)

    runner = HorovodRunner(np=-1)
    with pytest.raises(TypeError, match=r"train\(learning_rate=...\): .*'lr'.*\(lr: .float., ep"):
        runner.run(train, learning_rate=0.1)
    with pytest.raises(TypeError, match=r"train\(lr=..., rate=...\): .*'rate'"):
        runner.start(train, lr=0.1, rate=0.1)
    with pytest.raises(TypeError, match=r"\(lr: .float., epochs: .int.\)"):  # no defaults
        runner.run(train)
    with pytest.raises(TypeError, match=r"train\(lr=...\): .*'lr'"):
        runner.run(decorated, lr=0.1)
    assert runner.last_run is None
    assert runner.run(decorated) == 0.5


def test_every_public_name_is_there_and_no_other() -> None:
    assert dir(horovod_runner) == sorted(horovod_runner.__all__)
    for name in horovod_runner.__all__:
        assert getattr(horovod_runner, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Horovodrunner'"):
        horovod_runner.Horovodrunner  # noqa: B018


@pytest.mark.parametrize("module", ["horovod_runner", "horovod_runner.worker.main"])
def test_importing_brings_no_heavy_package(module: str) -> None:
    heavy = ["pyspark", "torch", "tensorflow", "keras", "numpy", "pyarrow", "pandas", "zmq"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_log_to_driver_prints_outside_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_driver("just a test")
    log_to_driver(12)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "just a test\n12\n"


def test_main_can_be_called_outside_a_run() -> None:
    report(loss=0.5, step=1)
    with pytest.raises(TypeError, match=r"'loss' .*\bstr\."):
        report(loss="0.5")
    save_checkpoint({"w": 1}, 1)
    assert load_checkpoint() is None
    assert load_checkpoint(into={}) is None
    assert load_checkpoint(into=dict) is None
    assert current_attempt() == 1


class Module:
    """Can be called and has a state, as models of torch."""

    def __call__(self) -> dict[str, int]:
        raise AssertionError

    def state_dict(self) -> dict[str, int]:
        return {}


class Model:
    """Named like Keras's."""

    trainable_variables = ()

    __call__ = Module.__call__


@pytest.mark.parametrize("into", [Module(), Model(), [1], "model"])
def test_a_state_to_load_into_is_a_dict_or_a_function(into: Any) -> None:
    with pytest.raises(TypeError, match=rf"^into .* {type(into).__name__}: load_checkpoint .*dict"):
        load_checkpoint(into=into)


def test_without_pyspark_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(horovod_runner.LaunchError, match=r"pip install horovod_runner\[spark\]"):
        HorovodRunner(np=1).run(print)


def test_only_the_users_own_folders_follow_to_a_task(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, missing = tmp_path / "own", tmp_path / "missing"
    installed = tmp_path / "lib" / "site-packages"
    own.mkdir()
    installed.mkdir(parents=True)
    monkeypatch.chdir(own)
    (own / "later").mkdir()
    here = list(sys.path)
    path = ("", str(missing), str(installed), sys.path[-1], "later")
    monkeypatch.chdir("/")  # the task's own folder
    assert rank_path(path, str(own)) == [str(own), *here, str(own / "later")]


def test_a_stream_that_is_gone_does_not_end_a_run() -> None:
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(closed):
        TerminalSink(1).log(0, "nobody hears this")


def test_output_goes_to_the_stream_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TerminalSink(2)
    sink.output(1, "stderr", "a\nb\n")
    sink.output(0, "stdout", "c\n")
    TerminalSink(1).output(0, "stdout", "no newline yet")
    captured = capsys.readouterr()
    assert captured.err == "[1] a\n[1] b\n"
    assert captured.out == "[0] c\nno newline yet"


def test_of_many_ranks_equal_lines_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TerminalSink(40)
    for rank in range(40):
        sink.output(rank, "stdout", "epoch 1\n" + ("odd\n" if rank in (3, 7) else "") + "epoch 1\n")
    sink.output(12, "stderr", "a warning\n")
    sink.notice("an event")
    captured = capsys.readouterr()
    assert captured.out == "[0-39] epoch 1\n[0-39] epoch 1\n[3, 7] odd\n"
    assert captured.err == "[12] a warning\nHorovodRunner: an event\n"


def test_lines_of_many_ranks_come_soon_and_none_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    sink = TerminalSink(40, clock=lambda: now)
    sink.output(0, "stdout", "a")
    sink.idle()
    assert capsys.readouterr().out == ""
    now = 0.9
    sink.output(1, "stdout", "a")  # it does not prolong the wait of the first one
    now = 1.0
    sink.idle()
    assert capsys.readouterr().out == "[0-1] a\n"
    sink.output(0, "stdout", "b")
    sink.idle()
    assert capsys.readouterr().out == ""
    now = 2.0
    sink.idle()
    assert capsys.readouterr().out == "[0] b\n"
    sink.output(1, "stdout", "".join(f"line {number}\n" for number in range(1001)))
    assert capsys.readouterr().out.count("[1] ") == 1001
    sink.output(2, "stdout", "the last one")
    sink.end(Run("1", 40, {}))
    assert capsys.readouterr().out == "[2] the last one\n"


def test_an_interrupt_loses_no_line_of_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    sink = TerminalSink(40)
    sink.output(0, "stdout", "a")
    with contextlib.redirect_stdout(Interrupted()), pytest.raises(KeyboardInterrupt):
        sink.log(0, "b")
    sink.end(Run("1", 40, {}))
    assert capsys.readouterr().out == "[0] a\n"


def test_a_misspelt_controller_in_the_environment_is_told() -> None:
    runner = HorovodRunner(np=-1, env={"HOROVOD_CONTROLLER": "glo"})
    with pytest.raises(ValueError, match=r"HOROVOD_CONTROLLER .*gloo .*mpi, .*'glo'"):
        runner.run(print)
