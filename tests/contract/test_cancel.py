"""`cancel()` and `horovod-runner stop` end a run within 30 s, whatever it is doing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import CancelledError, RunHandle, commit, log_to_driver
from horovod_runner.common.limits import Limits
from horovod_runner.driver.phases import State
from horovod_runner.results import registry
from horovod_runner.sinks import Sink
from horovod_runner.tools.commands import cli
from tests.conftest import Ranks, await_end, guards_and_ranks
from tests.contract.test_checkpoints import save_slowly_beside_a_failure
from tests.contract.test_end import in_thread
from tests.programs import await_condition as until
from tests.unkillable import await_waiting, unkillable

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
SECONDS = 60.0
Start = Callable[..., RunHandle]
GiveUp = Callable[..., None]


class Heard(Sink):
    """A sink that knows when a text has come."""

    def __init__(self, text: str, times: int = 1) -> None:
        self._text, self._times = text, times
        self.texts: list[str] = []
        self._heard = threading.Event()

    def log(self, rank: int, text: str) -> None:
        self.notice(text)

    def notice(self, text: str) -> None:
        self.texts.append(text)
        if sum(self._text in each for each in self.texts) >= self._times:
            self._heard.set()

    def wait(self) -> None:
        assert self._heard.wait(SECONDS), self.texts


def until_it_is(state: State, handle: RunHandle) -> None:
    """Wait until an attempt that is under way has this state."""
    supervisor = handle._requests.supervisor
    assert supervisor is not None
    until(lambda: supervisor.phase.state is state)


@pytest.fixture(params=["cancel", "stop"])
def give_up(request: pytest.FixtureRequest) -> GiveUp:
    """Gives a run up, in one of the two ways, and waits for its end as long as is promised."""

    def give_up(handle: RunHandle, *, all_end: bool = True) -> None:
        if request.param == "cancel":
            handle.cancel()
        else:
            (run_id,) = registry.running()
            status = cli.main(["stop", run_id, "--timeout", "30"])
            assert status == (0 if all_end else 1)
        assert isinstance(handle.exception(30), CancelledError)
        assert handle.status == "cancelled"
        assert registry.running() == []

    return give_up


@pytest.fixture
def start(ranks: Ranks) -> Iterator[Start]:
    """Starts a run: ``start(size, main, options, **kwargs)``. None outlasts a test that fails."""
    handles = []

    def start(size: Any, main: Any, options: dict[str, Any], **kwargs: Any) -> RunHandle:
        handles.append(ranks.runner(size, **options).start(main, **kwargs))
        return handles[-1]

    yield start
    for handle in handles:
        handle.cancel()
        handle.exception(SECONDS)


@contextmanager
def busy_slots(ranks: Ranks, count: int, folder: Path) -> Iterator[Callable[[], None]]:
    """A Spark job that takes slots until the end, or until the function is called."""
    assert ranks.spark is not None
    free = folder / "free"

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        Path(folder, f"busy-{os.getpid()}").touch()
        while not free.exists():
            time.sleep(0.01)
        yield from ()

    rows = ranks.spark.range(0, count, 1, count)
    job = in_thread(rows.mapInArrow(wait, "id long").collect)
    try:
        until(lambda: len(list(folder.glob("busy-*"))) == count)
        yield free.touch
    finally:
        free.touch()
        job.join()


def wait_for_ever() -> None:
    log_to_driver("up")
    threading.Event().wait()


@pytest.mark.places("spark", "connect")
def test_while_it_waits_for_slots(start: Start, give_up: GiveUp) -> None:
    handle = start(1000, int, {"slot_timeout": 600})
    until(registry.running)
    give_up(handle)


@pytest.mark.places("spark")
def test_while_an_elastic_run_waits_for_slots(
    ranks: Ranks, start: Start, give_up: GiveUp, tmp_path: Path
) -> None:
    waiting = Heard("waiting for slots: 2 of 4")
    options = {"slot_timeout": 600, "sinks": [waiting], "limits": Limits(slot_notice=0.1)}
    with busy_slots(ranks, 2, tmp_path):
        handle = start((3, 4), int, options)
        waiting.wait()
        give_up(handle)


@pytest.mark.places("spark")
def test_while_spark_has_not_started_its_tasks(
    ranks: Ranks, start: Start, give_up: GiveUp, tmp_path: Path
) -> None:
    assert ranks.spark is not None
    tracker = ranks.spark.sparkContext.statusTracker()
    with busy_slots(ranks, 4, tmp_path):
        handle = start(2, int, {})
        until(lambda: len(tracker.getActiveJobsIds()) == 2)
        give_up(handle)


@pytest.mark.places("spark", "connect")
def test_while_spark_packs_its_data(ranks: Ranks, start: Start, give_up: GiveUp) -> None:
    assert ranks.spark is not None

    def wait(batches: Any) -> Any:
        yield from batches
        threading.Event().wait()

    def main(data: Any) -> None:
        next(iter(data.batches(1)))

    rows = ranks.spark.range(4)
    handle = start(-1, main, {}, data=rows.mapInArrow(wait, rows.schema))
    until(registry.running)
    if ranks.place == "spark":
        tracker = ranks.spark.sparkContext.statusTracker()
        until(tracker.getActiveJobsIds)
    give_up(handle)


@pytest.mark.places("local", "spark")
@pytest.mark.parametrize("size", [2, (2, 2)])
def test_while_its_ranks_run(start: Start, give_up: GiveUp, size: int | tuple[int, int]) -> None:
    up = Heard("up", times=2)
    handle = start(size, wait_for_ever, {"sinks": [up]})
    up.wait()
    give_up(handle)


@pytest.mark.places("local", "spark")
def test_while_it_waits_for_a_checkpoint_after_a_failure(
    start: Start, give_up: GiveUp, tmp_path: Path
) -> None:
    saving = Heard("ends when the checkpoint that it is writing is complete")
    options = {"sinks": [saving], "limits": Limits(saving=1000.0)}
    handle = start(2, save_slowly_beside_a_failure, options, folder=tmp_path, seconds=600)
    saving.wait()
    give_up(handle)


@pytest.mark.places("local", "spark")
@pytest.mark.parametrize("size", [2, (2, 2)])
def test_between_two_attempts(start: Start, give_up: GiveUp, size: int | tuple[int, int]) -> None:
    between = Heard("attempt 2 begins in")

    def main() -> None:
        os._exit(3)

    handle = start(size, main, {"sinks": [between], "max_restarts": 100})
    between.wait()
    give_up(handle)


def commit_on_rank_0() -> None:
    """Rank 0 leaves at a commit once more ranks are possible; rank 1 makes none."""
    log_to_driver("up")
    step = 0
    while os.environ["HOROVOD_RANK"] == "0":
        step += 1
        commit({"step": step}, step)
        time.sleep(0.01)
    threading.Event().wait()


@pytest.mark.places("spark")
@pytest.mark.parametrize("leaving", [0.1, 1000.0])
def test_while_the_number_of_its_ranks_changes(
    ranks: Ranks, start: Start, give_up: GiveUp, tmp_path: Path, leaving: float
) -> None:
    up, resized = Heard("up", times=2), Heard("attempt 2 begins: from 2 to 3 ranks")
    options = {
        "sinks": [up, resized],
        "grow_after": 0.0,
        "limits": Limits(pool_tasks=0.1, leaving=leaving),
    }
    with busy_slots(ranks, 2, tmp_path) as free:
        handle = start((2, 3), commit_on_rank_0, options)
        up.wait()
        free()
        if leaving < 1:
            resized.wait()
        else:
            until_it_is(State.LEAVING, handle)
        give_up(handle)


@contextmanager
def a_rank_that_no_signal_ends() -> Iterator[Path]:
    """The path of a file that a rank is to look for. The rank ends after the block."""
    with unkillable() as path:
        yield path
    await_end(set().union(*guards_and_ranks()))


def pids_of(handle: RunHandle) -> list[int]:
    """The ranks' processes."""
    until(lambda: handle.run is not None and handle.run.ranks)
    assert handle.run is not None
    return [rank.pid for rank in handle.run.ranks if rank.pid is not None]


def look(path: Path) -> None:
    log_to_driver("up")
    path.exists()


@pytest.mark.places("local", "spark")
@pytest.mark.parametrize("size", [2, (2, 2)])
def test_while_a_rank_cannot_be_ended(
    start: Start, give_up: GiveUp, size: int | tuple[int, int]
) -> None:
    up = Heard("up", times=2)
    with a_rank_that_no_signal_ends() as path:
        handle = start(size, look, {"sinks": [up]}, path=path)
        up.wait()
        await_waiting(pids_of(handle))
        give_up(handle, all_end=False)
    assert any("SIGKILL has not ended" in text and "state D" in text for text in up.texts)


@pytest.mark.places("local", "spark")
def test_while_tasks_do_not_end_after_a_failure(start: Start) -> None:
    up, never = Heard("up", times=2), 1000.0

    def main(path: Path) -> None:
        log_to_driver("up")
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("failed beside a rank that no signal ends")
        path.exists()

    limits = Limits(killed_end=never, guard_end=never, ranks_end=1.0, launch_end=1.0)
    with a_rank_that_no_signal_ends() as path:
        handle = start(2, main, {"sinks": [up], "limits": limits}, path=path)
        up.wait()
        await_waiting(pids_of(handle)[:1])
        until_it_is(State.STOPPING, handle)
        handle.cancel()
        assert isinstance(handle.exception(30), CancelledError)
        assert "ranks may still run" in str(handle.exception())


@pytest.mark.places("local", "spark")
@pytest.mark.parametrize("size", [2, (2, 2)])
def test_a_run_that_succeeds_does_not_wait_for_what_no_signal_ends(
    ranks: Ranks, size: int | tuple[int, int]
) -> None:
    told = Heard("SIGKILL has not ended", times=2)

    def main(path: Path) -> int:
        stat = f"import os; print(os.getpid(), flush=True); os.stat({str(path)!r})"
        child = subprocess.Popen([sys.executable, "-c", stat], stdout=subprocess.PIPE)
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        await_waiting([pid])
        return pid

    runner = ranks.runner(size, sinks=[told], limits=Limits(killed_end=0.2))
    with unkillable() as path:
        pid = runner.run(main, path=path)
        told.wait()
    assert any(str(pid) in text for text in told.texts)
