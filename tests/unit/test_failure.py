"""The error of a failed run."""

from __future__ import annotations

import pickle
import re
import socket
import traceback
from pathlib import Path

import cloudpickle
import pytest
from msgspec.structs import replace

from horovod_runner import LaunchError, RankFailedError
from horovod_runner.errors import is_secondary
from horovod_runner.results.failures import run_error
from horovod_runner.wire.job import Outcome
from horovod_runner.wire.job_file import WorkerOutcome
from tests.stand_ins import StrictError

OK = WorkerOutcome(True, 0)


def raised(
    error: Exception, *, secondary: bool = False, pickled: bytes | None = None
) -> WorkerOutcome:
    text = "".join(traceback.format_exception(error))
    value = cloudpickle.dumps(error) if pickled is None else pickled
    return WorkerOutcome(False, 1, value, type(error).__name__, text, secondary)


def outcome(rank: int, worker: WorkerOutcome | None, code: int = 0, **fields: object) -> Outcome:
    return Outcome(rank, rank, f"host{rank}", 100 + rank, code, worker=worker, **fields)  # type: ignore[arg-type]


GONE = raised(RuntimeError("Connection closed by peer"), secondary=True)


def named(name: str, text: str, base: type[Exception] = RuntimeError) -> Exception:
    """An error of a library, whose class has this name."""
    return type(name, (base,), {})(text)


LOST = "failed to recv, got 0 bytes. Connection was likely closed."
REMOTE = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely."
)
XGBOOST = "[19:31:31] /workspace/src/collective/result.cc:83: [histogram.h:195]:"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [1.2.3.4]"
        ),
        RuntimeError("Gloo connectFullMesh failed with SO_ERROR: Connection refused, remote=..."),
        named("DistNetworkError", LOST, type(named("DistBackendError", ""))),
        named("DistBackendError", REMOTE),
        named("DistBackendError", "NCCL communicator was aborted on rank 1."),
        named("XGBoostError", XGBOOST, ValueError),
        named("LightGBMError", "Socket recv error, Connection reset by peer (code: 104)"),
    ],
)
def test_errors_of_libraries_after_the_loss_of_a_rank_are_consequences(
    error: Exception,
) -> None:
    assert is_secondary(error)
    assert not is_secondary(ValueError(str(error)))


def test_the_first_reported_rank_is_the_cause() -> None:
    outcomes = [outcome(r, raised(ValueError(f"of {r}"))) for r in range(3)]
    error = run_error(outcomes, reported=[2, 0])
    assert isinstance(error, ValueError)
    assert str(error) == "of 2"
    assert isinstance(error.__cause__, RankFailedError)
    assert error.__cause__.rank == 2


def test_survivors_are_never_the_cause() -> None:
    outcomes = [outcome(0, GONE), outcome(1, None, -9, tail=["epoch 3", "epoch 4"])]
    error = run_error(outcomes, reported=[])
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.host, error.pid, error.exit_code) == (1, "host1", 101, -9)
    assert "killed by SIGKILL" in str(error)
    assert "epoch 4" in str(error)


def test_a_rank_that_was_stopped_is_not_the_cause() -> None:
    error = run_error([outcome(0, None, -15, stopped=True), outcome(1, GONE)], reported=[])
    assert isinstance(error.__cause__, RankFailedError)
    assert error.__cause__.rank == 1
    assert "SIGTERM" not in str(error.__cause__)


def test_notes_do_not_hide_the_exception() -> None:
    wrong = ValueError("lr: 0.1")
    wrong.add_note(
        "HorovodRunner: train.py, line 3, was written for Keras 2\nWrite learning_rate=."
    )
    error = run_error([outcome(0, raised(wrong)), outcome(1, raised(wrong))], reported=[0, 1])
    assert error.__notes__[0].startswith("HorovodRunner: train.py, line 3")
    text = str(error.__cause__)
    assert "(pid 100) failed: ValueError: lr: 0.1\nThe same failure: rank 1.\n" in text
    assert "  | Write learning_rate=." in text


def noted(error: Exception) -> Exception:
    error.add_note("in epoch 3")
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA error: misaligned address\nCompile with X."), "misaligned address"),
        (named("AcceleratorError", "CUDA error: out of memory\nCompile with X."), "out of memory"),
        (noted(ValueError("no rows")), "ValueError: no rows"),
        (noted(AssertionError()), "AssertionError"),
        (RuntimeError("Caught it in a worker.\nTraceback:\nRuntimeError: no file"), "no file"),
        (ExceptionGroup("two failed", [ValueError("a\nb")]), "two failed (1 sub-exception)"),
    ],
)
def test_the_reason_is_the_first_line_of_the_exception(error: Exception, reason: str) -> None:
    other = raised(RuntimeError("CUDA error: illegal access\nCompile with X."))
    cause = run_error([outcome(0, raised(error)), outcome(1, other)], reported=[0, 1]).__cause__
    (first, *_) = str(cause).splitlines()
    assert first.endswith(reason)
    assert "The same failure" not in str(cause)


def test_an_exception_that_refuses_attributes_is_quoted() -> None:
    error = run_error([outcome(0, raised(StrictError("odd")))], reported=[0])
    assert isinstance(error, RankFailedError)
    assert "StrictError: odd" in str(error)


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_file_that_another_rank_of_the_host_wrote_later_is_named_with_what_to_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "table.csv"
    path.touch()
    missing = FileNotFoundError(2, "No such file", path.name if is_relative else str(path))
    failed = replace(outcome(1, raised(missing)), hostname=socket.gethostname())
    text = str(run_error([failed], reported=[1]).__cause__)
    assert "Call hvd.barrier() on every rank" in text
    assert ("name the full path" in text) == is_relative


def test_a_file_that_only_the_driver_has_is_named(tmp_path: Path) -> None:
    missing = FileNotFoundError(2, "No such file or directory", str(tmp_path))
    error = run_error([outcome(0, raised(missing))], reported=[0])
    assert re.search(rf"{tmp_path} .*driver's machine.* host0", str(error.__cause__))
    missing = FileNotFoundError(2, "No such file or directory", str(tmp_path / "none"))
    error = run_error([outcome(0, raised(missing))], reported=[0])
    assert "driver's machine" not in str(error.__cause__)


def test_if_all_ranks_are_survivors_the_lowest_rank_is_the_cause() -> None:
    error = run_error([outcome(2, GONE), outcome(1, GONE)], reported=[])
    assert isinstance(error.__cause__, RankFailedError)
    assert error.__cause__.rank == 1


def test_a_rank_that_returned_early_is_the_cause_of_the_others_errors() -> None:
    error = run_error([outcome(0, GONE), outcome(1, OK), outcome(2, GONE)], reported=[])
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert re.search("rank 1 returned .*ranks 0, 2 ", str(error))
    assert "Connection closed by peer" in str(error)


@pytest.mark.parametrize(
    ("module", "remedy"),
    [("horovod.torch", "horovod-runner install"), ("sklearn.svm", "pip install scikit-learn.")],
)
def test_a_missing_module_is_reported_with_the_command_that_installs_it(
    module: str, remedy: str
) -> None:
    missing = raised(ModuleNotFoundError(f"No module named '{module}'", name=module))
    cause = run_error([outcome(0, OK), outcome(1, missing)], reported=[1]).__cause__
    assert re.search(rf"host1 .* {module}\. ", str(cause))
    assert remedy in str(cause)


def test_equal_failures_are_reported_together() -> None:
    outcomes = [outcome(r, raised(ValueError("same"))) for r in range(6)]
    outcomes[4] = outcome(4, None, -15)  # stopped by its task
    cause = run_error(outcomes, reported=[1, 0, 2, 3, 5]).__cause__
    assert "ranks 0, 2-3, 5." in str(cause)


def test_an_exception_that_cannot_be_unpickled_is_quoted() -> None:
    error = run_error([outcome(0, raised(ValueError("odd"), pickled=b"junk"), 1)], reported=[0])
    assert isinstance(error, RankFailedError)
    assert "ValueError: odd" in str(error)


def test_a_task_without_a_worker_is_a_launch_error() -> None:
    error = run_error([Outcome(1, hostname="h", problem="no route")], reported=[])
    assert isinstance(error, LaunchError)
    assert str(error) == "task 1 of 1 on h: no route"


def test_the_error_names_the_gpu() -> None:
    error = run_error([outcome(0, None, 3, gpus=("7",))], reported=[])
    assert isinstance(error, RankFailedError)
    assert error.exit_code == 3
    assert "(pid 100, GPU 7)" in str(error)


def test_errors_survive_pickle() -> None:
    error = RankFailedError("text", rank=3, host="h", pid=4, exit_code=-9)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "text"
    assert vars(copy) == vars(error)
