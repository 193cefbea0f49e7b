"""Progress as lines of text, as without a terminal."""

from __future__ import annotations

import pytest

from horovod_runner.results.run import Run
from horovod_runner.sinks.progress import Progress
from horovod_runner.wire.events import Report
from horovod_runner.wire.measurements import Profile
from tests.stand_ins import SetClock


@pytest.fixture
def lines() -> Progress:
    """A sink that prints a line for every call of ``reports``."""
    return Progress(width=lambda: 0, line_seconds=0)


def test_only_reports_of_rank_0_move_the_bar(
    lines: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, step in ((1, 900), (0, 7), (2, 800)):
        lines.reports([Report(rank, {"loss": rank}, step=step)])
    assert capsys.readouterr().err == "HorovodRunner: step 7, loss=0\n"


def test_total_steps_is_the_end_of_the_bar_until_a_report_changes_it(
    lines: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    lines.reports([Report(0, {}, step=1, total_steps=20)])
    lines.reports([Report(0, {}, step=1), Report(0, {}, step=1)])
    lines.reports([Report(0, {}, step=1, total_steps=30)])
    shown = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    expected = ["step 1/20", "step 1/20", "step 1/30"]
    assert shown == [f"HorovodRunner: {text}" for text in expected]


def test_a_line_says_how_long_the_rest_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    clock = SetClock(1000.0)
    lines = Progress(width=lambda: 0, line_seconds=0, clock=clock)
    for seconds, step in ((0, 100), (10, 120), (20, 460)):
        clock.now = 1000.0 + seconds
        lines.reports([Report(0, {}, step=step, total_steps=460)])
    assert capsys.readouterr().err.splitlines() == [
        "HorovodRunner: step 100/460",
        "HorovodRunner: step 120/460, 2 steps/s, 0:02:50 left",
        "HorovodRunner: step 460/460, 18 steps/s",
    ]


def test_a_line_comes_every_ten_seconds_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = SetClock(1000.0)
    for status, last in (("finished", "step 4/4"), ("failed", "step 3/4")):
        lines = Progress(width=lambda: 0, clock=clock)
        for seconds, step in ((0, 0), (9, 1), (10, 2), (11, 3)):
            clock.now = 1000.0 + seconds
            lines.reports([Report(0, {}, step=step, total_steps=4)])
        # Of four steps that are counted from 0 the last one is 3.
        lines.end(Run("1a2b", 1, status=status))
        shown = [line.split(", ")[0] for line in capsys.readouterr().err.splitlines()]
        assert shown == [f"HorovodRunner: {text}" for text in ("step 0/4", "step 2/4", last)]


def test_what_was_shown_is_not_shown_again_at_the_end(
    lines: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    lines.reports([Report(0, {}, step=4, total_steps=4)])
    lines.end(Run("1a2b", 1, status="finished"))
    assert capsys.readouterr().err == "HorovodRunner: step 4/4\n"


def test_the_first_five_metrics_are_shown_with_their_latest_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Progress(width=lambda: 0, line_seconds=0, clock=lambda: 1000.0)
    lines.reports([Report(0, dict.fromkeys("abc", 1)), Report(0, {"d": 2, "b": 2.5})])
    lines.reports([Report(0, {**dict.fromkeys("efg", 3), "a": 0.123456}, epoch=1)])
    lines.attempt(2)
    lines.reports([Report(0, {"g": 4})])
    assert capsys.readouterr().err.splitlines() == [
        "HorovodRunner: step 2, a=1, b=2.5, c=1, d=2",
        "HorovodRunner: epoch 1, step 3, a=0.1235, b=2.5, c=1, d=2, e=3",
        "HorovodRunner: attempt 2, epoch 1, step 1, g=4",
    ]


def test_what_rank_0_waits_for_is_shown_where_it_is_much(
    lines: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    lines.profile(Profile(1, 0.0, 1.0, spent={"data": 0.9}))
    lines.profile(Profile(0, 0.0, 2.0, spent={"data": 0.8, "waiting": 0.2, "moving": 1.0}))
    lines.reports([Report(0, {"loss": 1}, step=7)])
    lines.profile(Profile(0, 0.0, 2.0, spent={"data": 0.1}))
    lines.reports([Report(0, {"loss": 1}, step=7)])
    lines.profile(Profile(0, 0.0, 1.0, spent={"data": 0.9, "waiting": 0.6}))  # began earlier
    lines.reports([Report(0, {"loss": 1}, step=7)])
    assert capsys.readouterr().err.splitlines() == [
        "HorovodRunner: step 7, loss=1, waits 40% for data",
        "HorovodRunner: step 7, loss=1",
        "HorovodRunner: step 7, loss=1, waits 60% for data, 40% for other ranks",
    ]


def test_the_pause_of_a_restart_does_not_count_as_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = SetClock()
    lines = Progress(width=lambda: 0, line_seconds=0, clock=clock)
    for attempt, began in ((1, 1000.0), (2, 2000.0)):
        lines.attempt(attempt)
        for seconds, step in ((0, 100), (10, 150)):
            clock.now = began + seconds
            lines.reports([Report(0, {}, step=step)])
    assert capsys.readouterr().err.splitlines() == [
        "HorovodRunner: step 100",
        "HorovodRunner: step 150, 5 steps/s",
        "HorovodRunner: attempt 2, step 100",
        "HorovodRunner: attempt 2, step 150, 5 steps/s",
    ]


@pytest.mark.parametrize(
    ("width", "values"),
    [
        (60, "loss=0.0205"),
        (80, "loss=0.0205, accuracy=0.9917"),
        (0, "loss=0.0205, accuracy=0.9917, lr=1"),
    ],
)
def test_a_bar_shows_the_metrics_that_fit_into_the_terminal(
    width: int, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = Progress(width=lambda: width)
    bar._lines = False
    metrics = {"loss": 0.0205, "accuracy": 0.9917, "lr": 1}
    bar.reports([Report(0, metrics, step=9, epoch=2, total_steps=120)])
    last = capsys.readouterr().err.rpartition("\r")[2]
    assert last.startswith("epoch 2:")
    assert last.rstrip().endswith(f"/s, {values}]")
