"""Whether and when a failed run is launched again."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner import (
    CheckpointError,
    ClusterConfig,
    HangError,
    HorovodRunner,
    LaunchError,
    Limits,
    RankFailedError,
    RanksChangedError,
    SlotError,
)
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.options import Options
from horovod_runner.driver.attempts import run_attempts
from horovod_runner.driver.launcher import Launch, Launcher, LaunchRequest
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.restarts import End, RestartPolicy, end_of
from horovod_runner.launchers import local
from horovod_runner.results import saved_run
from horovod_runner.results.run import Run
from horovod_runner.wire.job import Job, Outcome, WorkerOutcome
from tests.events import telling

_LOST = RankFailedError("", rank=1, exit_code=-9)
_THE_SAME = "the same error occurred again at the same place"


def _of_user(text: str = "", line: int = 7) -> Exception:
    error = ValueError(text)
    error.__cause__ = RankFailedError(f'... File "train.py", line {line}, in main', rank=0)
    return error


_A, _B, _C = (_of_user(line=line) for line in (1, 2, 3))
_failures = st.tuples(st.sampled_from([_A, _B, _LOST]), st.integers(-1, 3))


def _waits(
    failures: Sequence[tuple[Exception, int]], max_restarts: int = 10, *, elastic: bool = False
) -> tuple[list[float], str]:
    """The wait after each failure, and why there was none after the last one."""
    policy = RestartPolicy(max_restarts, elastic=elastic)
    waits = []
    for error, step in failures:
        seconds, why = policy.decide(error, step)
        if seconds is None:
            return waits, why
        waits.append(seconds)
    return waits, ""


@pytest.mark.parametrize("error", [_A, _LOST])
def test_without_restarts_no_failure_is_followed_by_another_attempt(error: Exception) -> None:
    assert RestartPolicy(0).decide(error, -1) == (None, "")


def test_an_error_that_would_come_again_is_final_and_says_all() -> None:
    assert RestartPolicy(10).decide(SlotError("too few"), 5) == (None, "")


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ([(_A, 1), (_A, 1)], _THE_SAME),
        ([(_A, 1), (_A, 0)], _THE_SAME),  # it was further before
        ([(_A, 1), (_A, 2)], ""),
        ([(_A, 1), (_B, 1)], ""),
        ([(_A, 1), (_LOST, 1), (_A, 1)], ""),
        ([(_LOST, 1), (_LOST, 1)], ""),
    ],
)
def test_an_error_that_comes_back_at_the_same_place_without_progress_ends_the_run(
    failures: list[tuple[Exception, int]], why: str
) -> None:
    assert _waits(failures)[1].startswith(why)
    assert bool(_waits(failures)[1]) == bool(why)


def test_errors_and_losses_are_counted_apart() -> None:
    failures = [(_A, -1), (_LOST, -1), (_B, -1), (_LOST, -1)]
    assert _waits(failures, 2) == ([1, 1, 1, 1], "")
    why = "there were 3 losses of a process or host (max_restarts)"
    assert _waits([*failures, (_LOST, -1)], 2)[1] == why
    assert _waits([*failures, (_C, -1)], 2)[1] == "there were 3 errors (max_restarts)"


def test_the_wait_doubles_up_to_a_minute_while_nothing_is_gained() -> None:
    assert _waits([(_LOST, -1)] * 9)[0] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert _waits([(_LOST, 1), (_LOST, 1), (_LOST, 2)])[0] == [1, 2, 1]
    assert _waits([(_LOST, -1)] * 1100, 1100)[0][-1] == 60
    # The other ranks of an elastic run are there.
    assert _waits([(_LOST, 1), (_LOST, 1), (_A, 1)], elastic=True)[0] == [0, 2, 1]


@given(st.lists(_failures, min_size=1, max_size=12), st.integers(0, 3))
def test_no_run_is_attempted_more_often_than_said(
    failures: list[tuple[Exception, int]], max_restarts: int
) -> None:
    assert len(_waits(failures, max_restarts)[0]) <= 2 * max_restarts


def test_the_same_line_with_other_numbers_in_its_text_is_the_same_place() -> None:
    assert end_of(_of_user("loss is nan at step 10"), 0) == end_of(_of_user("at 20"), 0)
    assert end_of(_A, 0) != end_of(_B, 0)


def test_an_error_of_the_run_itself_has_its_text_for_a_place() -> None:
    full, gone = CheckpointError("the disk is full"), CheckpointError("the folder is gone")
    assert end_of(full, 0) == end_of(CheckpointError(str(full)), 0)
    assert end_of(full, 0) != end_of(gone, 0)
    assert end_of(ValueError("at step 10"), 0) == end_of(ValueError("at step 20"), 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_LOST, "lost"),
        (RankFailedError("", rank=1), "lost"),
        (LaunchError("an executor was lost"), "lost"),
        (RankFailedError("", rank=1, exit_code=3), "error"),
        (HangError(""), "error"),
        (_A, "error"),
    ],
)
def test_signals_lost_tasks_and_launches_are_losses_and_the_rest_errors(
    error: Exception, kind: str
) -> None:
    end = end_of(error, 4)
    assert isinstance(end, End)
    assert (end.kind, end.step) == (kind, 4)


def test_the_record_says_why_not_even_a_first_attempt_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "serve", lambda *_: None)  # tasks that never wait for work
    cluster = ClusterConfig(limits=Limits(pool_slots=0.001))
    runner = HorovodRunner(np=(-1, -2), cluster_config=cluster)
    with pytest.raises(SlotError):
        runner.run(int)
    run = runner.last_run
    assert run is not None
    assert "needs at least 1 slot(s), and local has 0" in run.attempts[-1].error
    assert saved_run.end_of(run.run_id) == ("failed", run.attempts[-1].error)


class _Leaving(Launch, Launcher):
    """A launcher whose ranks leave for another number of ranks, and which has no slots then."""

    where = "test"
    channel_host = "127.0.0.1"
    shares_files = True
    finished = True

    def slots(self, size: int, patience: float = 0.0) -> int:
        raise SlotError("0 slots are free")

    def launch(self, request: LaunchRequest) -> _Leaving:
        return self

    def outcomes(self) -> list[Outcome]:
        error = RanksChangedError("left at a commit")
        worker = WorkerOutcome(False, 1, pickle.dumps(error))
        return [Outcome(rank, rank, exit_code=1, worker=worker) for rank in range(2)]


def test_the_record_says_why_no_attempt_follows_a_change_of_the_number_of_ranks(
    tmp_path: Path,
) -> None:
    options = Options(np=-2, checkpoint_dir=tmp_path)
    run, job = Run("0a1b2c3d", -2), Job("0a1b2c3d", 2, options, b"")
    with Archive(job.run_id, options) as archive, pytest.raises(SlotError):
        run_attempts(
            job,
            _Leaving(),
            telling(run=run),
            archive=archive,
            dataframes={},
            requests=Requests(),
            restarts=RestartPolicy(0),
        )
    assert "0 slots are free" in run.attempts[-1].error
