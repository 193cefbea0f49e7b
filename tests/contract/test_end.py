"""A run that is given up: cancelled, or its driver ended. Nobody may stay behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from horovod_runner import (
    CancelledError,
    HorovodRunner,
    LaunchError,
    current_attempt,
    log_to_driver,
)
from horovod_runner.common.options import Options
from horovod_runner.driver.launcher import JobCancelledError, PoolRequest
from horovod_runner.host.processes import wait_for_end
from horovod_runner.launchers.spark_job import SparkMembers
from horovod_runner.wire.job import Job
from tests.conftest import Ranks, await_end, guards_and_ranks
from tests.places import EVERYWHERE
from tests.programs import Program, run_python

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


class Calling(io.StringIO):
    """Calls a function when a text has come a number of times."""

    def __init__(self, text: str, times: int, function: Any) -> None:
        super().__init__()
        self._text, self._times = text, times
        self._function: Any = function

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._function is not None and self.getvalue().count(self._text) >= self._times:
            function, self._function = self._function, None
            function()
        return written


def wait_for_ever() -> None:
    log_to_driver("up")
    threading.Event().wait()


def wait_for_ever_and_end_late() -> None:
    def end_late(*_: object) -> None:
        time.sleep(1)  # libraries clean up
        os._exit(0)

    signal.signal(signal.SIGTERM, end_late)
    wait_for_ever()


def wait_in_first_attempt() -> int:
    if current_attempt() == 1:
        wait_for_ever()
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.places(*EVERYWHERE)
def test_cancel_from_another_thread_ends_all_ranks(ranks: Ranks) -> None:
    runner = ranks.runner(2)
    cancel = partial(_in_other_thread, runner.cancel)
    with (
        contextlib.redirect_stdout(Calling("up", 2, cancel)),
        pytest.raises(CancelledError, match="all ranks"),
    ):
        runner.run(wait_for_ever)
    assert runner.run(os.getpid) != os.getpid()  # and it runs again


@pytest.mark.places(*EVERYWHERE)
@pytest.mark.parametrize("main", [wait_for_ever, wait_for_ever_and_end_late])
def test_ctrl_c_ends_all_ranks(ranks: Ranks, main: Callable[[], None]) -> None:
    found: list[set[int]] = []

    def press() -> None:
        found.extend(guards_and_ranks())
        signal.raise_signal(signal.SIGINT)

    with contextlib.redirect_stdout(Calling("up", 2, press)), pytest.raises(KeyboardInterrupt):
        ranks.run(2, main)
    if ranks.place in ("spark", "cluster"):
        guards, up = found
        assert not up & guards_and_ranks()[1]
        await_end(guards)  # Spark has interrupted their tasks: they end by themselves


@pytest.mark.timeout(120)  # seconds; a run that loses the interrupt never ends
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.places("local")
def test_ctrl_c_ends_all_ranks_where_a_finalizer_drops_its_exception(ranks: Ranks) -> None:
    handler = signal.getsignal(signal.SIGINT)
    press = partial(signal.raise_signal, signal.SIGINT)

    def free() -> None:
        weakref.finalize({0}, press)  # at once: nobody holds the set

    with contextlib.redirect_stdout(Calling("up", 2, free)), pytest.raises(KeyboardInterrupt):
        ranks.run(2, wait_for_ever)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.places("spark", "cluster", "connect")
def test_a_spark_job_that_is_cancelled_ends_the_run(ranks: Ranks) -> None:
    spark = ranks.spark
    assert spark is not None
    is_connect = ranks.place == "connect"
    cancel_all = spark.interruptAll if is_connect else spark.sparkContext.cancelAllJobs
    with (
        contextlib.redirect_stdout(Calling("up", 2, partial(_in_other_thread, cancel_all))),
        pytest.raises(LaunchError, match=r"(?i)cancel|interrupt"),
    ):
        ranks.run(2, wait_for_ever, {"max_restarts": 3})
    assert ranks.run(2, int) == 0


@pytest.mark.places("spark")
@pytest.mark.parametrize("main", [wait_for_ever, wait_for_ever_and_end_late])
def test_spark_jobs_that_are_cancelled_end_an_elastic_run(
    ranks: Ranks, main: Callable[[], None]
) -> None:
    assert ranks.spark is not None
    cancel = partial(_in_other_thread, ranks.spark.sparkContext.cancelAllJobs)
    runner = ranks.runner((2, 3), max_restarts=3)
    with (
        contextlib.redirect_stdout(Calling("up", 3, cancel)),
        pytest.raises(LaunchError, match="cancel"),
    ):
        runner.run(main)
    assert len(runner.last_run.attempts) == 1


@pytest.mark.places("spark")
def test_spark_knows_of_cancelled_jobs_whose_end_is_not_told_yet(ranks: Ranks) -> None:
    spark = ranks.spark
    assert spark is not None
    told, known, heard = threading.Semaphore(0), threading.Event(), list[tuple[int, LaunchError]]()

    def ended(seat: int, reason: LaunchError) -> None:
        told.release()
        known.wait()
        heard.append((seat, reason))

    def wait(batches: Any) -> Any:
        yield from batches
        threading.Event().wait()

    job = Job("test", 2, Options(np=(2, 2)), b"")
    nowhere: Any = None
    request = PoolRequest(job, 2, nowhere, ended, lambda *_: None)
    members = SparkMembers(spark, request, [wait, wait], None)
    tracker = spark.sparkContext.statusTracker()
    while len(tracker.getActiveJobsIds()) < 2:
        time.sleep(0.01)
    assert members.settled()
    spark.sparkContext.cancelJobGroup("test-0")
    assert told.acquire(timeout=60)
    assert not members.settled()
    known.set()
    while not members.settled():
        time.sleep(0.01)
    ((seat, reason),) = heard
    assert (seat, type(reason)) == (0, JobCancelledError)
    members.close([], 10.0)


def test_the_end_of_the_session_ends_an_elastic_run_with_an_error_about_it() -> None:
    done = run_python(
        """
        from pyspark.sql import SparkSession
        from horovod_runner import HorovodRunner, LaunchError
        from horovod_runner.sinks import Sink
        from tests.contract.test_end import wait_for_ever

        builder = SparkSession.builder.master("local[2]")
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()

        class Stopping(Sink):
            def log(self, rank, text):
                spark.stop()

        try:
            HorovodRunner(np=(2, 2), sinks=[Stopping()]).run(wait_for_ever)
        except LaunchError as error:
            print("error:", error)
        """
    )
    assert "error: " in done.stdout, done.stderr


@pytest.mark.places("spark")
def test_each_end_of_a_task_has_its_own_reason(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.spark is not None
    failed, reasons = tmp_path / "failed", SimpleQueue[str]()

    def fail_once(batches: Any) -> Any:
        if not failed.exists():
            failed.touch()
            raise ValueError("the first time")
        return iter(())

    job = Job("test", 1, Options(np=(1, 1)), b"")
    nowhere: Any = None
    request = PoolRequest(
        job, 1, nowhere, lambda _, reason: reasons.put(str(reason)), lambda *_: None
    )
    members = SparkMembers(ranks.spark, request, [fail_once], None)
    assert "the first time" in reasons.get()
    assert reasons.get() == "a task of the run has ended: it had lost the driver."
    members.close([], 10.0)


@pytest.mark.places("spark")
def test_an_elastic_run_goes_on_without_the_stage_that_is_cancelled(ranks: Ranks) -> None:
    """Spark's UI has a link that does it."""
    assert ranks.spark is not None
    context = ranks.spark.sparkContext

    def cancel() -> None:
        stage = context.statusTracker().getActiveStageIds()[0]
        context._jsc.sc().cancelStage(stage)

    runner = ranks.runner((2, 3), max_restarts=1)
    with contextlib.redirect_stdout(Calling("up", 3, partial(_in_other_thread, cancel))):
        assert runner.run(wait_in_first_attempt) == 2
    assert [attempt.size for attempt in runner.last_run.attempts] == [3, 2]


def _in_other_thread(call: Callable[[], Any]) -> None:
    """Call a function in a thread, and wait for its end."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class in_thread(threading.Thread):  # noqa: N801 - reads as a call
    """Calls a function in a thread that keeps its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error


def test_without_a_run_there_is_nothing_to_cancel_and_no_stack(ranks: Ranks) -> None:
    runner = ranks.runner(1)
    runner.cancel()
    runner.dump_stacks()
    assert runner.run(int) == 0


def family() -> None:
    """A rank with a child in a session of its own."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    log_to_driver(f"pids {os.getpid()} {child.pid}")
    threading.Event().wait()


# A frozen driver is to its ranks what a cut network is: silence.
@pytest.mark.places("local", "spark", "connect")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_driver_takes_its_ranks_along(ranks: Ranks, number: signal.Signals) -> None:
    # Those who watch local ranks freeze with the driver; and Spark's own end is the same for any.
    if (
        number not in {"local": (signal.SIGTERM,), "spark": (signal.SIGSTOP,)}.get(ranks.place, ())
        and number != signal.SIGKILL
    ):
        pytest.skip(f"not in {ranks.place}")
    size = 2 if ranks.spark is not None else -2
    script = f"{ranks.opening}from horovod_runner import HorovodRunner\n"
    script += f"from tests.contract.test_end import family\nHorovodRunner(np={size}).run(family)\n"
    with Program(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as driver:
        assert driver.stdout is not None
        try:
            lines = [driver.stdout.readline() for _ in range(2)]
            processes = [psutil.Process(int(pid)) for line in lines for pid in line.split()[1:]]
            driver.send_signal(number)
            assert len(processes) == 4
            assert wait_for_end(processes, 15) == []
        finally:
            driver.kill()
    sweep()


def sweep() -> None:
    """Run once more: that removes the folders that a killed driver has left on this host."""
    HorovodRunner(np=-1).run(int)


def test_a_main_may_belong_to_an_object_that_holds_its_runner() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.runner = HorovodRunner(np=-1)

        def main(self) -> int:
            return 7

        def fit(self) -> Any:
            return self.runner.run(self.main)

    assert Trainer().fit() == 7
