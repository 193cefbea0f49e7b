"""Reports on their way into the pipe."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from horovod_runner import frames, messages
from horovod_runner.reports import Reporter, checked


class Pipe:
    """A pipe that the test reads."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def drain(self) -> list[messages.Report]:
        os.set_blocking(self.read, False)
        data = b""
        while True:
            try:
                piece = os.read(self.read, 1 << 20)
            except BlockingIOError:
                piece = b""
            if not piece:
                break
            data += piece
        found = [messages.decode_from_rank(each) for each in frames.unframe(data)]
        assert all(isinstance(each, messages.Report) for each in found)
        return found  # type: ignore[return-value]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    opened = Pipe()
    yield opened
    os.close(opened.read)
    os.close(opened.write)


def test_a_report_is_one_message(pipe: Pipe) -> None:
    Reporter(3, pipe.write, True).report({"loss": 0.5, "n": 7}, 10, 2)
    (found,) = pipe.drain()
    assert (found.rank, found.metrics, found.step, found.epoch) == (3, {"loss": 0.5, "n": 7}, 10, 2)


def test_nan_and_infinity_survive(pipe: Pipe) -> None:
    Reporter(0, pipe.write, True).report({"a": math.nan, "b": math.inf, "c": -math.inf}, None, None)
    (found,) = pipe.drain()
    assert math.isnan(found.metrics["a"])
    assert (found.metrics["b"], found.metrics["c"]) == (math.inf, -math.inf)


def test_a_rank_whose_reports_nobody_wants_sends_none_and_still_checks(pipe: Pipe) -> None:
    reporter = Reporter(1, pipe.write, False)
    reporter.report({"loss": 1.0}, None, None)
    with pytest.raises(TypeError):
        reporter.report({"loss": "1.0"}, None, None)
    assert pipe.drain() == []


def test_a_full_pipe_never_waits_and_nothing_is_uncounted(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    count = 50_000
    for step in range(count):
        reporter.report({"loss": float(step)}, step, None)
    first = pipe.drain()
    assert len(first) < count
    reporter.report({"other": 1.0}, count, None)
    rest = pipe.drain()
    assert [each.step for each in rest] == [count - 1, count]  # the latest value, then the new one
    assert len(first) + len(rest) + sum(each.left_out for each in rest) == count + 1


def test_the_latest_value_of_each_metric_comes_at_the_end(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    reporter.report({"first": 1.0}, 0, None)
    step = 0
    while not reporter._held:
        step += 1
        reporter.report({"loss": float(step)}, step, None)
    reporter.report({"rare": 7.0}, step + 1, None)
    reporter.report({"loss": 8.0}, step + 2, None)
    pipe.drain()
    reporter.finish()
    ends = {name: value for each in pipe.drain() for name, value in each.metrics.items()}
    assert ends == {"rare": 7.0, "loss": 8.0}


def test_more_metrics_than_fit_into_one_write_are_sent_in_parts(pipe: Pipe) -> None:
    metrics = {f"metric number {number}": float(number) for number in range(1000)}
    Reporter(0, pipe.write, True).report(metrics, 5, None)
    found = pipe.drain()
    assert len(found) > 1
    assert {name: value for each in found for name, value in each.metrics.items()} == metrics
    assert {each.step for each in found} == {5}


def test_whole_numbers_of_any_size_are_taken() -> None:
    assert checked({"n": 10**30}, None, None)[0] == {"n": 1e30}


@pytest.mark.parametrize(
    "value", ["0.5", None, [1.0], {}, 1j, b"1", Decimal(1), object(), float, print]
)
def test_what_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"the metric 'loss' is a .*metrics are numbers"):
        checked({"loss": value}, None, None)


def test_an_array_is_named_with_its_shape() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"a numpy\.ndarray of shape \(3, 2\)"):
        checked({"loss": np.zeros((3, 2))}, None, None)


@pytest.mark.parametrize("name", ["rank", "attempt", "time"])
def test_a_metric_has_no_name_of_the_tables_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be named '{name}'"):
        checked({name: 1.0}, None, None)


@pytest.mark.parametrize("step", [1.5, "3", True, [1]])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(TypeError, match="step must be a whole number"):
        checked({}, step, None)


def test_nothing_of_a_framework_is_imported_to_look_at_a_number() -> None:
    before = set(sys.modules)
    checked({"loss": 1.0, "n": 3}, 1, 1)
    assert set(sys.modules) == before


def test_a_name_that_no_message_holds_is_refused(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    with pytest.raises(ValueError, match="a metric's name of 5000 characters is too long"):
        reporter.report({"x" * 5000: 1.0, "loss": 1.0}, None, None)
    reporter.report({"loss": 2.0}, None, None)
    assert pipe.drain()[-1].metrics == {"loss": 2.0}


def test_a_report_without_metrics_that_finds_no_room_is_counted(pipe: Pipe) -> None:
    reporter = Reporter(0, pipe.write, True)
    count = 0
    while not reporter._held:
        reporter.report({"loss": 1.0}, count, None)
        count += 1
    for _ in range(5):
        reporter.report({}, count, None)
    first = pipe.drain()
    reporter.finish()
    rest = pipe.drain()
    assert len(first) + len(rest) + sum(each.left_out for each in rest) == count + 5
