"""A run in the background: what its handle says and does, with both launchers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from horovod_runner import CancelledError, RankFailedError, SlotError, log_to_driver, report
from tests.conftest import Ranks
from tests.programs import await_condition as until

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
SECONDS = 60.0


def wait_for(path: str) -> int:
    """Report once, then wait until there is a file of this name."""
    report(loss=0.5, step=1)
    log_to_driver("up")
    while not os.path.exists(path):
        time.sleep(0.01)
    return int(os.environ["RANK"])


def test_the_caller_goes_on_while_the_ranks_run(ranks: Ranks, tmp_path: Path) -> None:
    runner = ranks.runner(2)
    handle = runner.start(wait_for, path=str(tmp_path / "go"))
    assert not handle.done()
    assert handle.status == "running"
    handle.dump_stacks()  # nothing, or the stacks: never an error
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    until(lambda: handle.metrics.num_rows == 1)
    assert handle.metrics.column("loss").to_pylist() == [0.5]
    assert handle.run is runner.last_run
    values: list[int] = []
    threads = [
        threading.Thread(target=lambda: values.append(handle.result(SECONDS))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(SECONDS)
    assert values == [0, 0, 0]
    assert handle.exception() is None
    assert handle.done()
    assert handle.status == "finished"
    handle.cancel()  # changes nothing any more
    assert handle.result() == 0


def test_a_handle_raises_what_run_would_raise(ranks: Ranks) -> None:
    def main() -> None:
        raise ValueError("on purpose")

    handle = ranks.runner(2).start(main)
    with pytest.raises(ValueError, match="on purpose") as caught:
        handle.result(SECONDS)
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert handle.exception() is caught.value
    assert handle.status == "failed"


def test_a_handle_cancels_its_run_alone(ranks: Ranks, tmp_path: Path) -> None:
    runner = ranks.runner(2)
    first = runner.start(wait_for, path=str(tmp_path / "never"))
    second = runner.start(wait_for, path=str(tmp_path / "go"))
    until(lambda: first.metrics.num_rows == second.metrics.num_rows == 1)  # both at once
    first.cancel()
    with pytest.raises(CancelledError):
        first.result(SECONDS)
    assert first.status == "cancelled"
    assert not second.done()
    (tmp_path / "go").touch()
    assert second.result(SECONDS) == 0


def test_the_runner_cancels_all_its_runs(ranks: Ranks, tmp_path: Path) -> None:
    runner = ranks.runner(1)
    handles = [runner.start(wait_for, path=str(tmp_path / "never")) for _ in range(2)]
    until(lambda: all(handle.metrics.num_rows == 1 for handle in handles))
    runner.cancel()
    for handle in handles:
        assert isinstance(handle.exception(SECONDS), CancelledError)
    assert ranks.runner(1).run(os.getpid) != os.getpid()


@pytest.mark.places("spark")
def test_a_run_that_does_not_fit_says_so_through_its_handle(ranks: Ranks) -> None:
    handle = ranks.runner(100, slot_timeout=0).start(print)
    assert isinstance(handle.exception(SECONDS), SlotError)
    assert handle.status == "failed"
    assert handle.run is None
    assert handle.metrics.num_rows == 0
