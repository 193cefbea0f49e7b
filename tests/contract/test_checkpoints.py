"""Checkpoints, resume and restart, with every launcher."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import (
    CheckpointError,
    Limits,
    RankFailedError,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    save_checkpoint,
)
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.wire.messages import FilePart
from tests.conftest import Ranks

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


def count_to(last: int, fail_at: int | None = None) -> list[int]:
    """Count, save every number, and return the first one and the attempt."""
    checkpoint = load_checkpoint()
    first = 0 if checkpoint is None else checkpoint.state["count"]
    for count in range(first + 1, last + 1):
        save_checkpoint({"count": count}, step=count, metrics={"loss": -count})
        if count == fail_at and current_attempt() == 1:
            raise ValueError(f"failed at {count}")
    return [first, current_attempt()]


@pytest.fixture(params=["seen", "hidden"])
def seen(request: pytest.FixtureRequest) -> None:
    """Ranks see the folder of checkpoints, or do not."""
    if request.param == "hidden":
        request.getfixturevalue("hidden")


@pytest.mark.places("local", "spark", "cluster", "connect")
def test_checkpoints_are_on_the_driver_and_exist_as_long_as_the_result(ranks: Ranks) -> None:
    def main() -> None:
        for step in (10, 20, 30, 40):
            rank = os.environ["HOROVOD_RANK"]
            save_checkpoint({"weights": [step], "rank": rank}, step, {"loss": 1 / step})

    runner = ranks.runner(2, num_to_keep=3)
    runner.run(main)
    run = runner.last_run
    assert [each.step for each in run.checkpoints] == [20, 30, 40]
    assert run.latest_checkpoint.load() == {"weights": [40], "rank": "0"}
    assert run.latest_checkpoint.metrics == {"loss": 1 / 40}
    assert run.latest_checkpoint.size == Path(run.latest_checkpoint.path).stat().st_size
    folder = Path(run.latest_checkpoint.path).parent
    assert len(list(folder.glob("checkpoint-*"))) == 6
    del run, runner
    gc.collect()
    assert not folder.exists()


def test_the_best_checkpoints_and_the_latest_are_kept(ranks: Ranks, tmp_path: Path) -> None:

    def main() -> None:
        for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.8, 0.1]):
            save_checkpoint(b"x", step, {"accuracy": accuracy})

    options = {
        "num_to_keep": 2,
        "metric": "accuracy",
        "mode": "max",
        "checkpoint_dir": tmp_path / "new",
    }
    runner = ranks.runner(1, **options)
    runner.run(main)
    assert [each.step for each in runner.last_run.checkpoints] == [1, 3, 4]
    assert runner.last_run.best_checkpoint.step == 1
    assert runner.last_run.latest_checkpoint.step == 4
    assert len(list((tmp_path / "new").iterdir())) == 6


@pytest.mark.places("local", "cluster")
@pytest.mark.horovod
def test_a_run_with_another_np_resumes_from_the_latest_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    def main() -> Any:
        import horovod.torch as hvd
        import torch

        hvd.init()
        checkpoint = load_checkpoint()
        if checkpoint is None:
            save_checkpoint({"w": torch.arange(5.0)}, 1, {"loss": 2.0})
            save_checkpoint({"w": torch.arange(5.0) * 2}, 2, {"loss": 1.0})
            return None
        total = hvd.allreduce(checkpoint.state["w"], op=hvd.Sum, name="w")
        return checkpoint.step, dict(checkpoint.metrics), total.tolist()

    options = {"checkpoint_dir": tmp_path, "resume": True}
    assert ranks.run(1, main, options) is None  # there is no checkpoint yet
    assert ranks.run(3, main, options) == (2, {"loss": 1.0}, [0, 6, 12, 18, 24])


def test_without_resume_a_run_starts_new_and_keeps_checkpoints_of_earlier_runs(
    ranks: Ranks, tmp_path: Path
) -> None:
    for _ in range(2):
        runner = ranks.runner(1, checkpoint_dir=tmp_path, num_to_keep=1)
        assert runner.run(count_to, last=3) == [0, 1]
        assert [each.step for each in runner.last_run.checkpoints] == [3]
    assert len(list(tmp_path.glob("*.json"))) == 2
    runner = ranks.runner(1, checkpoint_dir=tmp_path, num_to_keep=1, resume=True)
    assert runner.run(count_to, last=5) == [3, 1]
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.places("local", "spark", "cluster", "connect")
def test_after_a_failure_the_next_attempt_resumes_from_the_latest_checkpoint(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ranks.runner(1, max_restarts=1)
    assert runner.run(count_to, last=6, fail_at=4) == [4, 2]
    run = runner.last_run
    assert [each.number for each in run.attempts] == [1, 2]
    assert run.attempts[0].error == "ValueError: failed at 4"
    assert [each.resumed_from for each in run.attempts] == [None, 4]
    assert [each.attempt for each in run.checkpoints] == [1, 2, 2]
    stderr = capsys.readouterr().err
    assert "attempt 1 failed: ValueError: failed at 4" in stderr
    assert (
        "attempt 2 begins in 1 s (error 1, max_restarts=1); load_checkpoint returns the " in stderr
    )
    assert "checkpoint of step 4" in stderr


@pytest.mark.places("local")
def test_of_two_runs_that_resume_in_one_folder_the_later_saves_and_the_earlier_says_so(
    ranks: Ranks, tmp_path: Path
) -> None:
    signals = tmp_path / "signals"
    signals.mkdir()

    def main(name: str, wait: bool) -> int:
        checkpoint = load_checkpoint()
        first = 0 if checkpoint is None else checkpoint.step
        save_checkpoint({"of": name}, first + 1)
        if wait:
            save_checkpoint({"of": name}, first + 2)  # the one before is complete then
            (signals / "saved").touch()
            while not (signals / "go").exists():
                time.sleep(0.01)
            save_checkpoint({"of": name}, first + 3)
        return first

    options: dict[str, Any] = {"checkpoint_dir": tmp_path / "folder", "resume": True}
    earlier, later = ranks.runner(1, **options), ranks.runner(1, **options)
    handle = earlier.start(main, name="earlier", wait=True)
    while not (signals / "saved").exists():
        assert not handle.done()
        time.sleep(0.01)
    while not handle.run.checkpoints:
        time.sleep(0.01)
    resumed_at = later.run(main, name="later", wait=False)
    assert resumed_at in (1, 2)
    (signals / "go").touch()
    assert handle.result(60) == 0
    (warning,) = earlier.last_run.warnings
    assert f"run {later.last_run.run_id}, which host" in warning
    assert later.last_run.warnings == []
    assert [each.step for each in later.last_run.checkpoints][-1] == resumed_at + 1
    assert later.last_run.latest_checkpoint.load() == {"of": "later"}
    assert not list((tmp_path / "folder").glob("*-step-3-*")) or resumed_at == 2


def test_a_rank_killed_while_writing_leaves_the_earlier_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    def main() -> Any:
        checkpoint = load_checkpoint()
        if checkpoint is not None:
            return checkpoint.step, len(os.listdir(tmp_path))
        save_checkpoint(b"small", 1)
        save_checkpoint(bytes(300_000_000), 2)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    runner = ranks.runner(1, max_restarts=1, checkpoint_dir=tmp_path)
    step, files = runner.run(main)
    assert step == 1
    assert files <= 4  # the checkpoint's two, the driver's probe, and the unfinished part
    assert len(os.listdir(tmp_path)) == 2


def save_slowly_beside_a_failure(folder: Path, seconds: float) -> None:
    """Rank 1 fails as soon as rank 0 has begun to write a checkpoint of step 7."""
    from horovod_runner.checkpoints import checkpoint as files

    publish, writing = files.publish, folder / "writing"

    def publish_slowly(*args: Any, **options: Any) -> None:
        writing.touch()
        time.sleep(seconds)  # as in a store that takes so long
        publish(*args, **options)

    if os.environ["HOROVOD_RANK"] == "0":
        files.publish = publish_slowly
        save_checkpoint({"count": 1}, step=7)
        threading.Event().wait()  # as in a collective without rank 1
    while not writing.exists():
        time.sleep(0.01)
    raise ValueError("failed beside a checkpoint")


@pytest.mark.places("local", "spark")
def test_a_checkpoint_that_is_being_written_when_another_rank_fails_is_completed(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ranks.runner(2)
    with pytest.raises(ValueError, match="failed beside a checkpoint"):
        runner.run(save_slowly_beside_a_failure, folder=tmp_path, seconds=1)
    assert runner.last_run.latest_checkpoint.step == 7
    assert runner.last_run.latest_checkpoint.load() == {"count": 1}
    waits = "ends when the checkpoint that it is writing is complete, in 60 s at most"
    assert f"rank 0 {waits}" in capsys.readouterr().out


def test_a_checkpoint_that_takes_too_long_does_not_keep_a_failed_run_from_ending(
    ranks: Ranks, tmp_path: Path
) -> None:
    runner = ranks.runner(2, limits=Limits(saving=0.5))
    with pytest.raises(ValueError, match="failed beside a checkpoint"):
        runner.run(save_slowly_beside_a_failure, folder=tmp_path, seconds=600)
    assert not runner.last_run.checkpoints


def test_an_error_that_repeats_at_the_same_line_ends_the_run(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:

    def main() -> None:
        log_to_driver(f"attempt {current_attempt()}")
        raise KeyError("always")

    runner = ranks.runner(2, max_restarts=5)
    with pytest.raises(KeyError, match="always") as caught:
        runner.run(main)
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert len(runner.last_run.attempts) == 2
    assert "the same error occurred again at the same place" in capsys.readouterr().err


def test_saving_the_same_steps_again_does_not_count_as_progress(ranks: Ranks) -> None:

    def main() -> None:
        for step in (1, 2):
            save_checkpoint({"step": step}, step)
        raise ValueError("always")

    runner = ranks.runner(1, max_restarts=5)
    with pytest.raises(ValueError, match="always"):
        runner.run(main)
    assert len(runner.last_run.attempts) == 2


@pytest.mark.places("local", "spark", "cluster")
def test_ranks_that_do_not_see_the_folder_send_and_fetch_checkpoints(
    ranks: Ranks, tmp_path: Path, hidden: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = os.urandom(20_000_000)
    write_part, sizes = Archive.part, []

    def part(archive: Archive, message: FilePart) -> Path | None:
        sizes.append(len(message.data))
        return write_part(archive, message)

    monkeypatch.setattr(Archive, "part", part)

    def main() -> Any:
        checkpoint = load_checkpoint()
        if checkpoint is None:
            for step in (1, 2):
                save_checkpoint(state, step)
            return None
        return checkpoint.step, checkpoint.state == state

    runner = ranks.runner(1, checkpoint_dir=tmp_path, num_to_keep=1)
    runner.run(main)
    assert sum(sizes) == 2 * len(state)
    assert runner.last_run.latest_checkpoint.load() == state
    assert len(list(tmp_path.glob("*.bin"))) == 1
    assert ranks.run(1, main, {"checkpoint_dir": tmp_path, "resume": True}) == (2, True)


def test_a_full_disk_fails_the_checkpoint_but_not_the_training(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> str:
        save_checkpoint(b"small", 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        save_checkpoint(bytes(1_000_000), 2)
        return "done"

    runner = ranks.runner(1)
    assert runner.run(main) == "done"
    assert [each.step for each in runner.last_run.checkpoints] == [1]
    stderr = capsys.readouterr().err
    assert "the checkpoint of step 2 could not be written: [Errno 27] File too large" in stderr
    assert "that of step 1 stays" in stderr
    (warning,) = runner.last_run.warnings
    assert "1 checkpoint of this run could not be written. The latest is of step 1." in warning
    assert warning in stderr


def test_a_run_that_requires_its_checkpoints_ends_at_the_first_that_cannot_be_written(
    ranks: Ranks, seen: None
) -> None:
    def main() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        save_checkpoint(bytes(1_000_000), 7)
        signal.alarm(60)  # otherwise it would go on for hours
        signal.pause()

    runner = ranks.runner(1, required=True)
    with pytest.raises(CheckpointError, match=r"step 7 .*File too large.*required=True"):
        runner.run(main)
    assert runner.last_run.status == "failed"


def test_a_run_whose_main_saves_nothing_says_so(ranks: Ranks, tmp_path: Path) -> None:
    runner = ranks.runner(1, checkpoint_dir=tmp_path)
    runner.run(lambda: None)
    (warning,) = runner.last_run.warnings
    assert "the run has no checkpoint: main never called save_checkpoint" in warning


@pytest.mark.places("local")
@pytest.mark.horovod
def test_load_checkpoint_before_init_is_an_error_with_the_call_to_add(
    ranks: Ranks, tmp_path: Path
) -> None:
    # Without a checkpoint, too.
    with pytest.raises(RuntimeError, match=r"load_checkpoint .*hvd\.init\(\)"):
        ranks.run(2, count_to, {"checkpoint_dir": tmp_path, "resume": True}, last=2)
