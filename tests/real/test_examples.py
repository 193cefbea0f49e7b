"""The examples as a user starts them: every way that the README names."""

from __future__ import annotations

import re
import runpy
import sys
import threading
from pathlib import Path

import pytest

from horovod_runner import HorovodRunner, report
from tests.preload import WARM
from tests.programs import ROOT, run

pytestmark = [pytest.mark.spark, pytest.mark.horovod]


def start(*command: str, directory: Path) -> str:
    done = run(*command, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) >= 10
    assert losses[-1] < losses[0] / 5
    accuracy = re.search(r"held-out digits: (\d+\.\d)%", output)
    assert accuracy is not None
    assert float(accuracy.group(1)) >= 95


def test_the_example_of_tensorflow_learns_the_digits(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "digits_tensorflow.py")
    check(start(*WARM, script, "--np", "2", directory=tmp_path))


def test_an_example_goes_on_where_it_ended_and_draws_its_losses(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "digits_torch.py")
    command = [*WARM, script, "--np", "-2", "--checkpoint-dir", "digits"]
    first = start(*command, "--epochs", "10", directory=tmp_path)
    rest = start(*command, "--resume", "--plot", "loss.svg", directory=tmp_path)
    assert re.findall(r"epoch +(\d+):", rest) == ["11", "12", "13", "14", "15"]
    check(first + rest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits", "loss.svg"]
    picture = (tmp_path / "loss.svg").read_text()
    assert "<!-- epoch_loss -->" in picture


def test_spark_submit_runs_the_same_file(tmp_path: Path) -> None:
    submit = str(Path(sys.executable).parent / "spark-submit")
    script = str(ROOT / "examples" / "digits_torch.py")
    check(start(submit, "--master", "local[2]", script, "--np", "2", directory=tmp_path))


def test_an_example_tunes_with_optuna_over_shared_slots(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script = str(ROOT / "examples" / "tune_optuna.py")
    output = start(*WARM, script, "--trials", "2", "--epochs", "5", directory=tmp_path)
    trials = re.findall(r"^trial \d: .*: (\w+) after epoch +(\d), loss \S+$", output, re.MULTILINE)
    assert trials[0] == ("complete", "5")
    assert len(trials) == 2
    assert {state for state, _ in trials} <= {"complete", "pruned"}
    best = re.search(r"^best: .* loss (\S+)$", output, re.MULTILINE)
    assert best is not None
    assert float(best[1]) < 1  # of 2.3 for a guess


def never_end() -> None:
    report(held_out_loss=9.0, epoch=1)
    threading.Event().wait()


def test_a_trial_that_falls_behind_is_cancelled_and_pruned() -> None:
    optuna = pytest.importorskip("optuna")
    follow = runpy.run_path(str(ROOT / "examples" / "tune_optuna.py"))["follow"]
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    handle = HorovodRunner(np=-1, progress=False).start(never_end)
    with pytest.raises(optuna.TrialPruned):
        follow(study.ask(), handle)
    assert handle.status == "cancelled"
