"""Errors in a notebook: long ones are short at first, and can be opened."""

from __future__ import annotations

import pickle
import sys
from copy import deepcopy
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.errors import HangError, RankFailedError
from horovod_runner.sinks import streams
from horovod_runner.sinks.notebook_error import fold_error, from_ranks, shortened, until_package
from tests.stand_ins import KERNEL, SHELL, StrictError

FRAMES = "\n".join(f"  | frame {number}" for number in range(40))
TEXT = f"rank 1 of 2 failed: KeyError\n\nTraceback on rank 1:\n{FRAMES}\n\nInstall it there."
SHORT = (
    "rank 1 of 2 failed: KeyError\n\nTraceback on rank 1:\n  | ... 36 lines are folded: see the "
    "whole error above\n  | frame 36\n  | frame 37\n  | frame 38\n  | frame 39\n\nInstall it there."
)


class UserError(Exception):
    """One that cannot be copied."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__("no such column")


def user_error(text: str) -> UserError:
    error = UserError(3, "x")
    error.__cause__ = RankFailedError(text, rank=1)
    return error


@pytest.mark.parametrize(
    "error", [user_error(TEXT), HangError(TEXT), RankFailedError(TEXT, rank=1)]
)
def test_an_error_is_short_for_the_time_of_showing_it(error: BaseException) -> None:
    def long_one(error: BaseException) -> BaseException | None:
        return error.__cause__ if isinstance(error, UserError) else error

    with shortened(error) as shown:
        assert (shown is error) == isinstance(error, UserError)  # it cannot be copied
        assert type(shown) is type(error)
        assert str(long_one(shown)) == SHORT
    assert str(long_one(error)) == TEXT


@pytest.mark.parametrize("in_notebook", [True, False])
def test_only_in_a_notebook_errors_are_folded(
    in_notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", KERNEL if in_notebook else SHELL)
    error = user_error(TEXT)
    fold_error(error)
    assert hasattr(error, "_render_traceback_") is in_notebook


def folded(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    monkeypatch.setitem(sys.modules, "IPython", KERNEL)
    fold_error(error)
    return error


def test_a_folded_error_can_be_pickled_for_a_process_without_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error: BaseException = folded(KeyError("label"), monkeypatch)
    data = pickle.dumps(error)
    assert b"horovod_runner" not in data
    again = pickle.loads(data)
    assert again.args == ("label",)
    assert again._render_traceback_() == ["KeyError: 'label'\n"]
    assert deepcopy(error).args == ("label",)


class OwnError(Exception):
    """One that shows itself."""

    def _render_traceback_(self) -> list[str]:
        return ["its own"]


@pytest.mark.parametrize("error", [OwnError(), StrictError()])
def test_an_error_that_shows_itself_or_cannot_be_changed_is_left_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(error, monkeypatch)
    assert vars(error) == {}


def test_an_error_is_shown_where_ipython_has_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    error: Any = folded(user_error(TEXT), monkeypatch)
    assert "frame 20" in "".join(error._render_traceback_())


def test_a_module_in_the_place_of_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    assert not streams.in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not streams.in_notebook()


@pytest.mark.parametrize("depth", [0, 700])
def test_a_traceback_ends_at_the_users_line(depth: int) -> None:
    def users(depth: int) -> None:
        if depth:
            users(depth - 1)
        HorovodRunner(np=1, checkpoint_dir=3)  # type: ignore[arg-type]

    with pytest.raises(TypeError) as raised:
        users(depth)
    names = [frame.name for frame in extract_tb(until_package(raised.tb))]
    assert names[-1] == "users"
    assert len(names) < len(extract_tb(raised.tb))


def test_an_error_that_did_not_come_from_the_ranks_keeps_its_traceback() -> None:
    assert from_ranks(user_error(TEXT))
    assert from_ranks(HangError(TEXT))
    assert not from_ranks(ValueError("of a sink"))
    assert not from_ranks(KeyboardInterrupt())
