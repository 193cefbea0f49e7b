"""Databricks' HorovodRunner: an old notebook before and after, from its first cell to its last."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, percent, run

pytestmark = [pytest.mark.spark, pytest.mark.horovod]


# Slow: a whole notebook, with runs of each framework.
def test_an_old_notebook_runs_as_it_is_and_then_with_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run("migrate_from_databricks", tmp_path, monkeypatch)
    instead = "horovod_runner.keras takes its place"
    alone = shown.by("hr = HorovodRunner(np=-1)")
    assert instead in alone
    assert re.findall(r"epoch (\d) of 3 ends: accuracy=", alone) == list("123")
    assert percent(alone)[0] > 85
    two = shown.by("hr = HorovodRunner(np=2)")
    assert instead in two
    assert re.findall(r"epoch (\d) of 3 ends: accuracy=", two) == list("123")
    accuracies = re.findall(r"rank \d of 2: accuracy (\S+)%", two)
    assert accuracies[0] == accuracies[1]
    saved = shown.by('(dbfs / "old").iterdir()')
    assert percent(saved) == [float(accuracies[0])]
    assert saved.splitlines()[1:] == [f"checkpoint-{epoch}.keras" for epoch in (1, 2, 3)]

    new = shown.by("max_restarts=1, **options")
    assert instead not in new
    # The model of epoch 2; or of epoch 1, if epoch 2's was being written when the ranks failed.
    ends = "".join(re.findall(r"epoch (\d) of 4 ends", new))
    begins = "".join(re.findall(r"epoch (\d) of 4 begins", new))
    assert (ends, begins) in [("1234", "12334"), ("12234", "123234")]
    assert "attempt 1 failed: OSError: the network is down" in new
    attempts = shown.by("runner.last_run.attempts")
    assert "attempt 1, from the start: OSError: the network is down" in attempts
    step = 46 if ends == "1234" else 23
    assert f"attempt 2, from step {step}: finished" in attempts
    assert percent(attempts)[0] > 90
    assert shown.is_picture("runner.last_run.plot")
    resumed = shown.by("resume=True, **options")
    assert re.findall(r"epoch (\d) of 6 ends", resumed) == list("56")
    model = shown.by("load_model")
    assert percent(resumed)[-1] == percent(model)[-1] > 92


def test_the_eight_steps_are_named_one_after_another() -> None:
    notebook = nbformat.read(NOTEBOOKS / "migrate_from_databricks.ipynb", 4)
    cells = [cell.source for cell in notebook.cells]
    steps = [found[1] for cell in cells if (found := re.match(r"### Step (\d): \w", cell))]
    assert steps == list("12345678")
    (code,) = (cell for cell in cells if cell.startswith("def train(data"))
    numbers = "".join(re.findall(r"  # (\d[\d; a-z]*)", code))
    assert set(re.findall(r"\d", numbers)) == set("12345678")
