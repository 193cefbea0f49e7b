"""The figures of Run.plot()."""

from __future__ import annotations

import math

import pytest

from horovod_runner.results.run import Attempt, Run
from horovod_runner.wire.events import Report

pytest.importorskip("matplotlib")


def run_of(*reports: tuple[int, int | None, dict[str, float]]) -> Run:
    run = Run("test", 4)
    for attempt, step, metrics in reports:
        run._metrics.extend([Report(0, metrics, step=step)], attempt)
    return run


def test_every_metric_has_a_panel_and_every_attempt_a_line() -> None:
    first = [(1, step, {"loss": 1 / (step + 1), "accuracy": 0.5}) for step in range(10)]
    again = [(2, step, {"loss": 1 / (step + 1)}) for step in range(5, 20)]
    figure = run_of(*first, *again).plot()
    loss, accuracy = figure.axes
    assert [axes.get_title() for axes in (loss, accuracy)] == ["loss", "accuracy"]
    drawn = [line for line in loss.lines if len(line.get_xdata()) > 2]
    assert [list(line.get_xdata()) for line in drawn] == [list(range(10)), list(range(5, 20))]
    (mark,) = [line for line in loss.lines if len(line.get_xdata()) == 2]
    assert list(mark.get_xdata()) == [5, 5]  # the first step that the restart reported
    assert len(accuracy.lines) == 1
    assert loss.get_xlabel() == "step"
    assert figure._suptitle.get_text() == "np=4, running"


def test_every_panel_marks_the_step_that_a_restart_resumed_from() -> None:
    first = [(1, step, {"loss": 1.0, "accuracy": 0.5}) for step in (10, 20, 30)]
    again = [(2, 30, {"loss": 1.0}), (2, 40, {"accuracy": 0.5})]
    run = run_of(*first, *again)
    run.attempts = [Attempt(1, 0.0), Attempt(2, 1.0, resumed_from=20)]
    for axes in run.plot().axes:
        (mark,) = [line for line in axes.lines if list(line.get_xdata()) == [20, 20]]
        assert mark.get_linestyle() == ":"


def test_a_notebook_shows_the_figure_without_settings() -> None:
    shown = run_of((1, 1, {"loss": 1.0})).plot()._repr_png_()  # type: ignore[attr-defined]
    assert shown.startswith(b"\x89PNG")


def test_reports_without_a_step_are_drawn_by_their_count() -> None:
    reports = [(1, None, {"loss": value}) for value in (3.0, math.nan, 1.0)]
    (axes,) = run_of(*reports).plot("loss").axes
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2]
    assert axes.get_xlabel() == "report"


def test_many_points_are_thinned_but_the_last_one_is_drawn() -> None:
    run = run_of(*[(1, step, {"loss": 0.0}) for step in range(20_002)])
    xs = list(run.plot().axes[0].lines[0].get_xdata())
    assert len(xs) <= 10_001
    assert xs[-1] == 20_001  # although 20_001 is not a multiple of the stride


def test_the_error_for_an_unknown_metric_lists_the_reported_ones() -> None:
    with pytest.raises(ValueError, match=r"'los' .*: loss$"):
        run_of((1, 1, {"loss": 1.0})).plot("los")
    with pytest.raises(ValueError, match=r"'loss' .*none: .*report\(\)$"):
        run_of().plot("loss")
    with pytest.raises(ValueError, match=r"only rank 0.* are kept.*report_ranks=\"all\""):
        run_of((1, 1, {"loss": 1.0})).plot("loss", rank=1)
    assert run_of().plot().axes == []
