"""Whether and when a failed run is launched again."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from horovod_runner import HangError, LaunchError, RankFailedError
from horovod_runner.driver.attempts import End, end_of, wait_before_restart

_ends = st.builds(End, st.sampled_from(["error", "lost"]), st.sampled_from("ab"), st.integers(0, 3))


def _error(place: str, checkpoint: int = 0) -> End:
    return End("error", place, checkpoint)


def _lost(checkpoint: int = 0) -> End:
    return End("lost", "rank 1: -9", checkpoint)


def test_without_restarts_no_failure_is_followed_by_another_attempt() -> None:
    assert wait_before_restart([_lost()], 0) is None
    assert wait_before_restart([_error("a")], 0) is None


def test_an_error_that_comes_back_at_the_same_place_ends_the_run() -> None:
    assert wait_before_restart([_error("a", 1), _error("a", 1)], 10) is None


def test_an_error_that_comes_back_after_a_new_checkpoint_does_not() -> None:
    assert wait_before_restart([_error("a", 1), _error("a", 2)], 10) is not None


def test_another_error_does_not() -> None:
    assert wait_before_restart([_error("a"), _error("b")], 10) is not None


def test_a_loss_that_comes_back_does_not() -> None:
    assert wait_before_restart([_lost(), _lost()], 10) is not None


def test_errors_and_losses_are_counted_apart() -> None:
    ends = [_error("a"), _lost(), _error("b"), _lost()]
    assert wait_before_restart(ends, 2) is not None
    assert wait_before_restart([*ends, _lost()], 2) is None
    assert wait_before_restart([*ends, _error("c")], 2) is None


def test_the_wait_doubles_up_to_a_minute_while_nothing_is_gained() -> None:
    waits = [wait_before_restart([_lost()] * count, 100) for count in range(1, 10)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert wait_before_restart([_lost(1), _lost(1), _lost(2)], 100) == 1


@given(st.lists(_ends, min_size=1, max_size=12), st.integers(0, 3))
def test_no_run_is_attempted_more_often_than_said(ends: list[End], max_restarts: int) -> None:
    attempts = 1 + sum(
        wait_before_restart(ends[:count], max_restarts) is not None
        for count in itertools.takewhile(
            lambda count: wait_before_restart(ends[:count], max_restarts) is not None,
            range(1, len(ends) + 1),
        )
    )
    assert attempts <= 1 + 2 * max_restarts


def _of_user(text: str, line: int) -> Exception:
    error = ValueError(text)
    error.__cause__ = RankFailedError(f'... File "train.py", line {line}, in main', rank=0)
    return error


def test_the_same_line_with_other_numbers_in_its_text_is_the_same_place() -> None:
    assert end_of(_of_user("loss is nan at step 10", 7), 0) == end_of(_of_user("at 20", 7), 0)
    assert end_of(_of_user("x", 7), 0) != end_of(_of_user("x", 8), 0)


def test_signals_lost_tasks_and_launches_are_losses_and_the_rest_errors() -> None:
    assert end_of(RankFailedError("", rank=1, exit_code=-9), 0).kind == "lost"
    assert end_of(RankFailedError("", rank=1), 0).kind == "lost"
    assert end_of(LaunchError("an executor was lost"), 0).kind == "lost"
    assert end_of(RankFailedError("", rank=1, exit_code=3), 0).kind == "error"
    assert end_of(HangError(""), 0).kind == "error"
    assert end_of(_of_user("x", 7), 0).kind == "error"
