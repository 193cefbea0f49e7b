"""Checkpoints on S3: uploads that are cut, a store that is busy, and credentials that expire."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from horovod_runner import CheckpointError, load_checkpoint, save_checkpoint
from horovod_runner.checkpoints import loader
from horovod_runner.folders.opening import open_folder
from horovod_runner.folders.problems import describe
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker
from tests.conftest import Ranks
from tests.stores.conftest import write_credentials
from tests.stores.s3 import Server

URL = "s3://mine/checkpoints"


def test_a_run_gets_over_a_bad_day_of_the_store_and_resumes(
    s3: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.faults.faults = {"step-1-": ["torn", "busy", "busy"]}
    s3.faults.expired = ("first", ("step-2-", "step-3-"))

    def main() -> int:
        checkpoint = load_checkpoint()
        if checkpoint is not None:
            return checkpoint.step
        for step in (1, 2):
            save_checkpoint({"step": step, "bytes": b"x" * 100_000}, step)
        # The rank tries once more with what it finds then.
        refused = os.environ["AWS_ENDPOINT_URL"] + "/-/refused"
        while int(urllib.request.urlopen(refused).read()) < 5:
            time.sleep(0.05)
        write_credentials(Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]), "second")
        save_checkpoint({"step": 3}, 3)
        return 0

    ranks = Ranks("local")
    runner = ranks.runner(1, checkpoint_dir=URL)
    assert runner.run(main) == 0
    assert s3.faults.refused == {"torn": 1, "busy": 2, "expired": 3}
    run = runner.last_run
    assert [each.step for each in run.checkpoints] == [1, 3]
    (warning,) = run.warnings
    assert "1 checkpoint of this run could not be written. The latest is of step 3." in warning
    assert "the checkpoint of step 2 could not be written: The provided token has" in warning
    assert "Renew the credentials" in warning
    assert warning in capsys.readouterr().err
    assert ranks.run(1, main, {"checkpoint_dir": URL, "resume": True}) == 3


def test_a_run_that_requires_its_checkpoints_ends_at_the_first_that_fails(s3: Server) -> None:
    s3.faults.expired = ("first", ("step-2-",))

    def main() -> None:
        for step in (1, 2):
            save_checkpoint(b"state", step)
        signal.alarm(60)  # otherwise it would go on for hours
        signal.pause()

    runner = Ranks("local").runner(1, checkpoint_dir=URL, required=True)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written: The provided token"):
        runner.run(main)
    assert [each.step for each in runner.last_run.checkpoints] == [1]
    assert runner.last_run.status == "failed"


def test_a_store_that_stays_busy_is_named_with_what_to_change(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore; s3fs tries several times, too
    s3fs.S3FileSystem.clear_instance_cache()
    folder = open_folder(URL)
    part = tmp_path / "part"
    part.write_bytes(b"state")
    s3.faults.faults = {"busy": ["busy"] * 100}
    with pytest.raises(OSError, match="reduce your request rate") as caught:
        folder.move_in(part, "busy")
    assert s3.faults.refused["busy"] > 2
    assert "save less often, or allow more tries (AWS_RETRY_MODE" in describe(caught.value)
    assert part.exists()
    assert folder.names() == []
    folder.move_in(part, "quiet")
    assert folder.names() == ["quiet"]


def test_a_store_that_cannot_be_read_is_no_reason_to_start_from_the_beginning(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    markers = [
        Marker(f"checkpoint-00000{step}-step-{step}-run1.bin", step, step, "bytes", 5, "", "run1")
        for step in (2, 1)
    ]
    plan = CheckpointPlan(URL, "run2", resume=tuple(markers))
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    warned: list[str] = []
    with pytest.raises(CheckpointError, match=r"step 2\) cannot be read: .*no credentials on"):
        loader.load(plan, 0, 1, warned.append)
    assert warned == []
