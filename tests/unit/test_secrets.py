"""Passwords of URLs: not in errors of this package, what caused them, notices and records."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import pytest

from horovod_runner import CheckpointError, DataError, RankFailedError
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.options import Options, grouped
from horovod_runner.data.read.readers import name_in_errors
from horovod_runner.errors import HorovodRunnerError, forget_passwords
from horovod_runner.host.folders.problems import describe
from horovod_runner.results import run_log
from horovod_runner.results.recorder import failed
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunLog
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.sinks.sink import Sink
from horovod_runner.wire.events import AttemptBegan
from tests.unit.test_card import checkpoint

URL = "s3://me:my-password@bucket/runs"


def test_an_error_of_this_package_holds_no_password_also_on_the_driver() -> None:
    error = RankFailedError(f"cannot read {URL}?token=my-password", rank=1)
    there = pickle.loads(pickle.dumps(error))
    for each in (error, there):
        assert str(each) == "cannot read s3://***@bucket/runs?token=***"
        assert each.rank == 1
    assert pickle.loads(pickle.dumps(CheckpointError(URL))).args == ("s3://***@bucket/runs",)


def raised(cause: Exception, *, explicit: bool) -> HorovodRunnerError:
    try:
        try:
            raise cause
        except Exception as error:
            raise DataError("cannot be read") from error if explicit else DataError("why")
    except HorovodRunnerError as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
def test_a_cause_that_names_a_password_is_not_shown(explicit: bool) -> None:
    error = raised(OSError(f"denied: {URL}"), explicit=explicit)
    forget_passwords(error)
    assert "my-password" not in "".join(traceback.format_exception(error))
    kept = raised(OSError("denied: s3://bucket/runs"), explicit=True)
    forget_passwords(kept)
    assert "denied: s3://bucket" in "".join(traceback.format_exception(kept))


def test_an_error_of_a_store_that_quotes_the_url_of_a_dataset_becomes_one_of_the_dataset() -> None:
    with (
        pytest.raises(
            DataError, match=r"^train: OSError: denied: s3://\*\*\*@bucket/runs$"
        ) as caught,
        name_in_errors("train"),
    ):
        raise OSError(f"denied: {URL}")
    assert "my-password" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(OSError, match=r"^denied$"), name_in_errors("train"):
        raise OSError("denied")


def test_a_folder_that_cannot_be_used_is_named_without_its_password() -> None:
    options = Options(**grouped({"np": 1, "checkpoint_dir": f"nosuch://{URL.partition('://')[2]}"}))
    with pytest.raises(CheckpointError, match=r"nosuch://\*\*\*@bucket"), Archive("run", options):
        pass
    assert "my-password" not in describe(OSError(f"denied: {URL}"))


def test_notices_reach_no_sink_with_a_password() -> None:
    class Heard(Sink):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def notice(self, text: str) -> None:
            self.texts.append(text)

    ours, theirs = Heard(), Heard()
    sinks = FanOut(RunLog(Run("test", 1)), [ours], [theirs], lambda text: None)
    sinks.notice(f"cannot write to {URL}")
    sinks.close()
    assert ours.texts == theirs.texts == ["cannot write to s3://***@bucket/runs"]


def test_a_record_holds_no_password_and_its_checkpoints_say_so(tmp_path: Path) -> None:
    run = Run("1a2b", 2)
    recorder = RunLog(run)
    recorder.add([AttemptBegan(1)])
    recorder.add([failed(OSError(f"denied: {URL}\nmore of {URL}"))])
    found = checkpoint(URL)
    found.folder = URL
    run._checkpoints.append(found)
    run_log.save(run, tmp_path / "record")
    assert b"my-password" not in (tmp_path / "record").read_bytes()
    recorded = run_log.load(tmp_path / "record")
    assert recorded.attempts[0].error == "OSError: denied: s3://***@bucket/runs"
    (known,) = recorded.checkpoints
    assert known.path == "s3://***@bucket/runs/c.bin"
    with pytest.raises(CheckpointError, match=r"records hold no passwords.*checkpoint_dir="):
        known.load()


def test_a_record_is_read_where_its_checkpoints_cannot_be(tmp_path: Path) -> None:
    run = Run("1a2b", 2)
    found = checkpoint("nosuch://bucket/runs")
    found.folder = "nosuch://bucket/runs/"
    run._checkpoints.append(found)
    run_log.save(run, tmp_path / "record")
    (known,) = run_log.load(tmp_path / "record").checkpoints
    assert known.path == "nosuch://bucket/runs/c.bin"
    with pytest.raises(CheckpointError, match="nosuch://bucket"):
        known.load()
