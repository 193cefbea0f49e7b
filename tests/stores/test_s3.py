"""Checkpoints on S3: uploads that are cut, a store that is busy, and credentials that expire."""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path

import pytest

from horovod_runner import CheckpointError, load_checkpoint, save_checkpoint
from horovod_runner.checkpoints import loader
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.problems import describe
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker
from tests.conftest import Ranks
from tests.connect.test_detached import NOWHERE, hear_while_it_lasts
from tests.preload import TORCH
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


@pytest.mark.spark
@pytest.mark.places("connect")
def test_output_of_a_detached_run_arrives_through_the_store_with_credentials_from_env(
    s3: Server, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DRIVER_HOST", NOWHERE)
    names = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
    env = {name: os.environ[name] for name in names}
    notices = hear_while_it_lasts(ranks, tmp_path, saves=False, checkpoint_dir=URL, env=env)
    assert f"through files in {URL}" in notices
    assert open_folder(URL).names() == []


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
    with pytest.raises(CheckpointError, match=r"\(step 2\) .*: Unable to locate credentials"):
        loader.load(plan, 0, 1, warned.append)
    assert warned == []


@pytest.mark.horovod
def test_ranks_write_their_parts_of_a_checkpoint_to_the_store(s3: Server) -> None:
    s3.faults.expired = ("first", ("step-2-*__1_1.distcp",))
    s3.faults.faults = {"__0_1.distcp": ["busy"], ".metadata": ["torn"]}

    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for step in (1, 2, 3):
            state = {"x": torch.full((20_000,), step), "y": torch.full((20_000,), -step)}
            save_checkpoint({**state, "step": step}, step, sharded=True)

    runner = Ranks("local", warm=TORCH).runner(2, checkpoint_dir=URL, num_to_keep=1)
    runner.run(main)
    run = runner.last_run
    assert [each.step for each in run.checkpoints] == [3]
    (warning,) = run.warnings
    assert "the checkpoint of step 2 could not be written: rank 1: The provided token" in warning
    assert {**s3.faults.refused, "expired": 0} == {"busy": 1, "torn": 1, "expired": 0}
    names = [name for name in open_folder(URL).names() if not name.startswith(".")]
    assert sorted(Path(name).suffix for name in names) == [".dcp", ".json"]
    loaded = run.checkpoints[0].load()
    assert (loaded["step"], float(loaded["x"].min()), float(loaded["y"].max())) == (3, 3, -3)
