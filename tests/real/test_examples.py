"""The examples as a user starts them: every way that the README names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.horovod]

ROOT = Path(__file__).parents[2]


def start(*command: str, directory: Path) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        timeout=500,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
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
    check(start(sys.executable, script, "--np", "2", directory=tmp_path))


def test_an_example_goes_on_where_it_ended_and_draws_its_losses(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "digits_torch.py")
    command = [sys.executable, script, "--np", "-2", "--checkpoint-dir", "digits"]
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
