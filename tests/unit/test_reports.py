"""A rank writes reports to a pipe: complete, counted, and without waiting."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest

from horovod_runner import report
from horovod_runner.common.numbers import check_report
from horovod_runner.results.recorder import plain_params
from horovod_runner.wire import events, messages
from horovod_runner.worker.reporter import Reporter


class Pipe:
    """A pipe that the test reads."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)

    def drain(self) -> list[events.Report]:
        data = b""
        with suppress(BlockingIOError):  # it is empty
            data = os.read(self.read, 1 << 20)  # more than a pipe holds
        reports = messages.decode_batch(data)
        assert all(isinstance(report, events.Report) for report in reports)
        return reports  # type: ignore[return-value]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    opened = Pipe()
    yield opened
    os.close(opened.read)
    os.close(opened.write)


def fill(reporter: Reporter) -> int:
    """Report until the pipe is full; returns the step of the report that had no room."""
    step = 0
    while not reporter._held:
        step += 1
        reporter.report({"loss": float(step)}, step, None)
    return step


def test_a_report_is_one_message(pipe: Pipe) -> None:
    metrics = {"loss": 0.5, "n": 7, "a": math.nan, "b": math.inf, "c": -math.inf}
    Reporter(3, pipe.write, True).report(metrics, 10, 2)
    (sent,) = pipe.drain()
    assert (sent.rank, sent.step, sent.epoch) == (3, 10, 2)
    assert repr(sent.metrics) == repr(metrics)


def test_total_steps_is_sent_once_also_where_its_own_report_is_dropped(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    reporter.report({"loss": 1.0}, 1, None, 100)
    reporter.report({"loss": 2.0}, 2, None)
    assert [sent.total_steps for sent in pipe.drain()] == [100, None]
    fill(reporter)
    reporter.report({"loss": 2.0}, None, None, 100)
    pipe.drain()
    reporter.report({"loss": 3.0}, None, None)
    assert [sent.total_steps for sent in pipe.drain()] == [100, None]


def test_total_steps_is_a_whole_number(pipe: Pipe) -> None:
    with pytest.raises(TypeError, match=r"^total_steps .*\(1\.5\)"):
        Reporter(0, pipe.write, True).report({}, None, None, 1.5)
    with pytest.raises(TypeError, match=r"^total_steps .*\('100'\)"):
        report(total_steps="100")  # type: ignore[arg-type]


def test_a_rank_whose_reports_do_not_count_only_checks_them(pipe: Pipe) -> None:
    reporter = Reporter(1, pipe.write, False)
    reporter.report({"loss": 1.0}, None, None)
    with pytest.raises(TypeError):
        reporter.report({"loss": "1.0"}, None, None)
    assert pipe.drain() == []


def test_with_a_full_pipe_reports_are_dropped_and_counted(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    count = 50_000
    for step in range(count):
        reporter.report({"loss": float(step)}, step, None)
    first = pipe.drain()
    assert len(first) < count
    reporter.report({"other": 1.0}, count, None)
    rest = pipe.drain()
    # The latest value of the dropped reports, then the new report.
    assert [report.step for report in rest] == [count - 1, count]
    assert len(first) + len(rest) + sum(report.left_out for report in rest) == count + 1


def test_the_latest_value_of_each_metric_is_sent_at_the_end(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    reporter.report({"first": 1.0}, 0, None)
    step = fill(reporter)
    reporter.report({"rare": 7.0}, step + 1, None)
    reporter.report({"loss": 8.0}, step + 2, None)
    pipe.drain()
    reporter.finish()
    ends = {name: value for report in pipe.drain() for name, value in report.metrics.items()}
    assert ends == {"rare": 7.0, "loss": 8.0}


def test_a_report_that_is_too_long_for_one_write_is_sent_in_parts(pipe: Pipe) -> None:
    metrics = {f"metric number {number}": float(number) for number in range(1000)}
    Reporter(0, pipe.write, True).report(metrics, 5, None)
    reports = pipe.drain()
    assert len(reports) > 1
    assert {name: value for report in reports for name, value in report.metrics.items()} == metrics
    assert {report.step for report in reports} == {5}


def test_whole_numbers_of_any_size_are_accepted() -> None:
    assert check_report({"n": 10**30}, None, None)[0] == {"n": 1e30}


@pytest.mark.parametrize(
    "value", ["0.5", None, [1.0], {}, 1j, b"1", Decimal(1), object(), float, print]
)
def test_the_error_names_a_metric_that_is_not_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"'loss' .*number.* got .*\b{type(value).__name__}\."):
        check_report({"loss": value}, None, None)


def test_the_error_has_an_arrays_shape() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"'loss' .*numpy\.ndarray .*\(3, 2\)"):
        check_report({"loss": np.zeros((3, 2))}, None, None)


@pytest.mark.parametrize("name", ["rank", "attempt", "time"])
def test_a_metric_must_not_be_named_like_a_column(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}': .*columns"):
        check_report({name: 1.0}, None, None)


@pytest.mark.parametrize("step", [1.5, "3", True, [1]])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(TypeError, match=f"^step .* {type(step).__name__} "):
        check_report({}, step, None)


def test_checking_a_number_imports_no_framework() -> None:
    before = set(sys.modules)
    check_report({"loss": 1.0, "n": 3}, 1, 1)
    assert set(sys.modules) == before


def test_a_metrics_name_that_is_too_long_is_refused(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    with pytest.raises(ValueError, match=r" 5000 .* 4096 "):
        reporter.report({"x" * 5000: 1.0, "loss": 1.0}, None, None)
    reporter.report({"loss": 2.0}, None, None)
    assert pipe.drain()[-1].metrics == {"loss": 2.0}


def test_a_dropped_report_without_metrics_is_counted(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    count = fill(reporter)
    for _ in range(5):
        reporter.report({}, count, None)
    first = pipe.drain()
    reporter.finish()
    rest = pipe.drain()
    assert len(first) + len(rest) + sum(report.left_out for report in rest) == count + 5


def test_parameters_hold_no_secrets() -> None:
    given = {"hf_token": "abc", "lr": 0.1, "url": "s3://me:abc@bucket/x", "data": object()}
    expected = {"np": 2, "hf_token": "***", "lr": 0.1, "url": "s3://***@bucket/x"}
    assert plain_params(2, given) == expected
