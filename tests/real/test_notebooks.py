"""The notebooks, from their first cells to their last, and what a person then sees."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.horovod, pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


class Shown:
    """What the cells of a notebook show, by their sources."""

    def __init__(self, notebook: Any) -> None:
        self._cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        self.text = "".join(map(_text, self._cells))

    def by(self, source: str) -> str:
        """What the one cell shows that has this in its source."""
        return _text(self._cell(source))

    def html(self, source: str) -> str:
        """The table that the one cell with this in its source ends with."""
        return "".join(_data(self._cell(source), "text/html"))

    def is_picture(self, source: str) -> bool:
        """Whether the one cell with this in its source shows a picture, and one alone."""
        pictures = _data(self._cell(source), "image/png")
        return [base64.b64decode(each)[1:4] for each in pictures] == [b"PNG"]

    def _cell(self, source: str) -> Any:
        (found,) = (cell for cell in self._cells if source in cell.source)
        return found


def _text(cell: Any) -> str:
    """Streams, and the value that the cell ends with."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    return "".join([*streams, *_data(cell, "text/plain")])


def _data(cell: Any, kind: str) -> list[str]:
    outputs = (output.get("data", {}) for output in cell.outputs)
    return [data[kind] for data in outputs if kind in data]


def _percent(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(\d+\.\d+)%", text)]


def quickstart(shown: Shown) -> None:
    greetings = shown.by("def hello(greeting)")
    assert "Hello from rank 0" in greetings
    assert "1 rank(s) have met" in greetings
    two = shown.by("HorovodRunner(np=-2).run(hello,")
    assert {"[0] Hello from rank 0", "[1] Hello from rank 1"} <= set(two.splitlines())
    assert "2 rank(s) have met" in two
    on_spark = shown.by("HorovodRunner(np=2).run(hello,")
    assert "2 rank(s) have met" in on_spark
    assert "Hello" not in on_spark
    logged = shown.by("def hello_driver")
    assert "Hello" not in logged
    assert all(f"rank {rank} wants you to see this line" in logged for rank in (0, 1))
    everything = shown.by('driver_log_verbosity="all"')
    assert all(f"[{rank}] Hello from rank {rank}" in everything for rank in (0, 1))
    assert all(f"rank {rank} wants you to see this line" in everything for rank in (0, 1))

    trained = shown.by("runner.run(train,")
    assert re.findall(r"epoch (\d): \S+% of 297 digits are right", trained) == list("12345")
    assert _percent(trained)[-1] == _percent(trained)[-2] > 93
    alone = shown.by("HorovodRunner(np=-1).run(train")
    assert _percent(alone)[-1] > 88
    left = shown.by("runner.last_run.ranks")
    assert "rank 0: exit code 0" in left
    assert "rank 1: exit code 0" in left
    assert re.search(r"\d\.\d s until the first line of train ran\n\d+\.\d s in all", left)
    assert "<td>120</td>" in shown.html("runner.last_run.metrics")
    assert shown.is_picture("runner.last_run.plot")

    failed = shown.by("def divide(by)")
    assert "ZeroDivisionError: division by zero\n\nrank 1 of 2 on" in failed
    assert "Traceback on rank 1:" in failed
    assert "line 5, in divide" in failed
    assert "0.3333" in shown.by("spark.stop()")


def migrate_from_databricks(shown: Shown) -> None:
    instead = "horovod_runner.keras takes its place"
    alone = shown.by("hr = HorovodRunner(np=-1)")
    assert instead in alone
    assert re.findall(r"epoch (\d) of 3 ends: accuracy=", alone) == list("123")
    assert _percent(alone)[0] > 85
    two = shown.by("hr = HorovodRunner(np=2)")
    assert instead in two
    assert re.findall(r"epoch (\d) of 3 ends: accuracy=", two) == list("123")
    accuracies = re.findall(r"rank \d of 2: accuracy (\S+)%", two)
    assert accuracies[0] == accuracies[1]
    saved = shown.by('(dbfs / "old").iterdir()')
    assert _percent(saved) == [float(accuracies[0])]
    assert saved.splitlines()[1:] == [f"checkpoint-{epoch}.keras" for epoch in (1, 2, 3)]

    new = shown.by("max_restarts=1, **options")
    assert instead not in new
    assert re.findall(r"epoch (\d) of 4 ends", new) == list("1234")
    assert re.findall(r"epoch (\d) of 4 begins", new) == list("12334")
    assert "attempt 1 failed: OSError: the network is down" in new
    attempts = shown.by("runner.last_run.attempts")
    assert "attempt 1, from the start: OSError: the network is down" in attempts
    assert "attempt 2, from step 46: finished" in attempts
    assert _percent(attempts)[0] > 90
    assert shown.is_picture("runner.last_run.plot")
    resumed = shown.by("resume=True, **options")
    assert re.findall(r"epoch (\d) of 6 ends", resumed) == list("56")
    model = shown.by("load_model")
    assert _percent(resumed)[-1] == _percent(model)[-1] > 92


def checkpoint_and_resume(shown: Shown) -> None:
    killed = shown.by("kill_in_epoch=4")
    attempts = re.findall(r"attempt (\d), epoch +(\d+): accuracy", killed)
    assert attempts == [("1", "1"), ("1", "2"), ("1", "3"), ("2", "4"), ("2", "5"), ("2", "6")]
    assert "rank 1 of 2" in killed
    assert "its process was killed by SIGKILL" in killed
    assert "2 rank(s) go on after epoch 3, step 75" in killed
    listed = shown.by("runner.last_run.attempts")
    assert re.search(r"attempt 1, from the start: RankFailedError: rank 1 of 2 .*SIGKILL", listed)
    assert "attempt 2, from step 75: finished" in listed
    assert shown.is_picture("runner.last_run.plot")
    twice = shown.by("losses.pivot")
    last = re.search(r"steps 76 to (\d+)\n", twice)
    assert last is not None
    assert 80 < int(last[1]) < 90
    difference = re.search(r"differ by (\S+) at most", twice)
    assert difference is not None
    assert float(difference[1]) < 1e-4

    resumed = shown.by("resume=True, **options")
    assert "4 rank(s) go on after epoch 6, step 150" in resumed
    epochs = re.findall(r"attempt 1, epoch +(\d+): accuracy", resumed)
    assert epochs == ["7", "8", "9", "10"]
    by_epoch = [*_percent(killed)[:6], *_percent(resumed)[:4]]
    accuracies = {25 * epoch: accuracy for epoch, accuracy in enumerate(by_epoch, 1)}
    assert accuracies[250] > 90
    kept = shown.by("second.last_run.checkpoints")
    steps = [int(step) for step in re.findall(r"step (\d+): accuracy", kept)]
    assert steps[-1] == 250
    assert 2 <= len(steps) <= 3
    best = shown.by("second.last_run.best_checkpoint")
    step = re.search(r"the best checkpoint is of epoch (\d+), step (\d+)", best)
    assert step is not None
    assert int(step[2]) == 25 * int(step[1])
    assert accuracies[int(step[2])] == max(accuracies.values())
    then, here = re.findall(r"(\d+\.\d\d)%", best)
    assert then == here


def bodo_style(shown: Shown) -> None:
    trained = shown.by("def main():")
    assert "2 ranks have found y = 3.00 x + 1.00" in trained
    lines = set(trained.splitlines())
    assert {"[0] trains with the rows 0 to 424", "[1] trains with the rows 425 to 849"} <= lines
    assert {"[2] does not train", "[3] does not train"} <= lines
    shares = re.findall(r"^(\d) +(\d+) +(\d+)$", shown.by("shares = runner"), re.MULTILINE)
    assert [tuple(map(int, row)) for row in shares] == [
        (0, 100, 425),
        (1, 0, 425),
        (2, 600, 0),
        (3, 150, 0),
    ]
    assert shown.is_picture("shares.plot.bar")
    program = shown.by("done = subprocess.run")
    assert program.startswith(("started by mpirun\n", "started by horovodrun\n"))
    assert program.splitlines()[1:5] == [
        "rank 0: 0 rows, then 1250: y = 3.00 x + 1.00",
        "rank 1: 499 rows, then 1249: y = 3.00 x + 1.00",
        "rank 2: 1000 rows, then 0: does not train",
        "rank 3: 1000 rows, then 0: does not train",
    ]


CHECKS = [quickstart, migrate_from_databricks, checkpoint_and_resume, bodo_style]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Shown], None]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # conftest sets it; a person who opens a notebook has not.
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    notebook = nbformat.read(NOTEBOOKS / f"{check.__name__}.ipynb", 4)
    client = nbclient.NotebookClient(
        notebook, timeout=250, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = Shown(notebook)
    check(shown)
    assert "Warning: " not in shown.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_paths(path: Path) -> None:
    text = path.read_text()
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell["id"] for cell in json.loads(text)["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
    for machine in (str(ROOT), str(Path.home()), "/home/", "/tmp/", os.uname().nodename + ":"):
        assert machine not in text


def test_the_eight_steps_are_named_one_after_another() -> None:
    notebook = nbformat.read(NOTEBOOKS / "migrate_from_databricks.ipynb", 4)
    cells = [cell.source for cell in notebook.cells]
    steps = [found[1] for cell in cells if (found := re.match(r"### Step (\d): \w", cell))]
    assert steps == list("12345678")
    (code,) = (cell for cell in cells if cell.startswith("def train(data"))
    numbers = "".join(re.findall(r"  # (\d[\d; a-z]*)", code))
    assert set(re.findall(r"\d", numbers)) == set("12345678")
