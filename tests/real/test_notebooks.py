"""The notebooks, from their first cells to their last, and what a person then sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks import Shown, percent, run

pytestmark = [pytest.mark.spark, pytest.mark.horovod]


def quickstart(shown: Shown) -> None:
    assert shown.is_picture("load_digits")
    for cell in ("HorovodRunner(np=-2)", "runner = HorovodRunner(np=2)"):
        trained = shown.by(cell)
        assert re.findall(r"epoch (\d): \S+% of 297 digits are right", trained) == list("12345")
        assert percent(trained)[-1] == percent(trained)[-2] > 93
    assert shown.is_picture("runner.last_run.plot")
    left = shown.by("runner.last_run.ranks")
    assert "rank 0: exit code 0" in left
    assert "rank 1: exit code 0" in left
    assert re.search(r"\d\.\d s until the first line of train ran\n\d+\.\d s in all", left)
    assert "<td>120</td>" in shown.html("runner.last_run.metrics")

    failed = shown.by("def divide(by)")
    assert "ZeroDivisionError: division by zero\n\nrank 1 of 2 on" in failed
    assert "Traceback on rank 1:" in failed
    assert "line 5, in divide" in failed
    assert "return 1 / (by - hvd.rank())  # rank 1 divides by zero" in failed
    assert "0.3333" in shown.by("spark.stop()")


def checkpoint_and_resume(shown: Shown) -> None:
    killed = shown.by("kill_in_epoch=4")
    attempts = re.findall(r"attempt (\d), epoch +(\d+): accuracy", killed)
    assert attempts == [("1", "1"), ("1", "2"), ("1", "3"), ("2", "4"), ("2", "5"), ("2", "6")]
    assert "rank 1 of 2" in killed
    assert "its process was killed by SIGKILL" in killed
    assert "2 rank(s) resume after epoch 3, step 75" in killed
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
    assert "4 rank(s) resume after epoch 6, step 150" in resumed
    epochs = re.findall(r"attempt 1, epoch +(\d+): accuracy", resumed)
    assert epochs == ["7", "8", "9", "10"]
    by_epoch = [*percent(killed)[:6], *percent(resumed)[:4]]
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


def pipeline_and_predictions(shown: Shown) -> None:
    assert shown.is_picture("model.plot()")
    scored = shown.by("printSchema()")
    assert "prediction: double" in scored
    assert percent(scored)[0] > 85
    low, high = percent(shown.by("found.avgMetrics"))
    assert low < 30
    assert high > 85
    assert percent(shown.by("PipelineModel.load"))[0] > 85
    right = re.search(
        r"(\d+) of (\d+) digits are right", shown.by("from horovod_runner import predict")
    )
    assert right is not None
    assert int(right[1]) / int(right[2]) > 0.85


def migrate_from_horovod_spark(shown: Shown) -> None:
    history = shown.by("model.getHistory()")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", history)]
    assert len(losses) == 4
    assert losses[3] < losses[0] / 3
    assert history.endswith("True\n")
    (before,) = percent(shown.by("label_pred"))
    (after,) = percent(shown.by("from horovod_runner import ml"))
    assert before > 80
    assert after == before  # the same training
    assert shown.is_picture("fitted.plot()")


def elastic(shown: Shown) -> None:
    run = shown.by("kill_at=60)")
    begun = re.findall(r"attempt (\d): (\d) ranks, from step (\d+)", run)
    assert begun[0] == ("1", "4", "0")
    # The executor is killed at step 60; on a loaded machine its rank goes on for some steps.
    assert 55 <= int(begun[1][2]) < 200
    assert begun[-1][1] == "4"
    attempts = shown.by("runner.last_run.attempts").splitlines()
    assert re.match(r"attempt 1: 4 ranks; .*lost", attempts[0])
    # Two ranks are left, unless Spark has replaced the executor before they begin.
    assert re.match(
        r"attempt 2: (2 ranks, after a pause of \d+\.\d s; from 2 to [34] ranks"
        r"|4 ranks, after a pause of \d+\.\d s; finished)",
        attempts[1],
    )
    assert attempts[-1].endswith("finished")
    difference = re.search(r"differ by (\S+) at most", shown.by("difference = max"))
    assert difference is not None
    assert float(difference[1]) < 1e-3
    assert shown.is_picture("runner.last_run.plot")


CHECKS = [
    elastic,
    quickstart,
    checkpoint_and_resume,
    bodo_style,
    pipeline_and_predictions,
    migrate_from_horovod_spark,
]


# Slow: whole notebooks, whose kernels start Spark and their frameworks anew.
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Shown], None]
) -> None:
    check(run(check.__name__, tmp_path, monkeypatch))
