"""A run that is given up: cancelled, or its driver ended. Nobody may stay behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_runner import CancelledError, HorovodRunner, LaunchError, log_to_driver
from tests.conftest import Ranks
from tests.places import EVERYWHERE

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


@pytest.mark.places(*EVERYWHERE)
def test_cancel_from_another_thread_ends_all_ranks(ranks: Ranks) -> None:
    runner = ranks.runner(2)

    def cancel() -> None:
        thread = threading.Thread(target=runner.cancel)
        thread.start()
        thread.join()

    with (
        contextlib.redirect_stdout(Calling("up", 2, cancel)),
        pytest.raises(CancelledError, match="all ranks are gone"),
    ):
        runner.run(wait_for_ever)
    assert runner.run(os.getpid) != os.getpid()  # and it runs again


@pytest.mark.places(*EVERYWHERE)
def test_ctrl_c_ends_all_ranks(ranks: Ranks) -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    with contextlib.redirect_stdout(Calling("up", 2, press)), pytest.raises(KeyboardInterrupt):
        ranks.run(2, wait_for_ever)


@pytest.mark.places("spark", "cluster", "connect")
def test_a_spark_job_that_is_cancelled_ends_all_ranks(ranks: Ranks) -> None:
    spark = ranks.spark
    assert spark is not None
    if ranks.place == "connect":
        cancel_all = spark.interruptAll
    else:
        cancel_all = spark.sparkContext.cancelAllJobs

    def cancel() -> None:
        thread = threading.Thread(target=cancel_all)
        thread.start()
        thread.join()

    with (
        contextlib.redirect_stdout(Calling("up", 2, cancel)),
        pytest.raises(LaunchError, match=r"(?i)cancel|interrupt"),
    ):
        ranks.run(2, wait_for_ever)
    assert ranks.run(2, int) == 0


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


def test_cancel_without_a_run_does_nothing(ranks: Ranks) -> None:
    runner = ranks.runner(1)
    runner.cancel()
    assert runner.run(int) == 0


@pytest.mark.places("spark", "connect")
def test_cancel_ends_the_wait_for_slots(ranks: Ranks) -> None:
    runner = ranks.runner(1000, slot_timeout=600)
    run = in_thread(lambda: runner.run(print))
    while run.is_alive():
        runner.cancel()
        run.join(0.1)
    assert isinstance(run.error, CancelledError)


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
    session = ""
    if ranks.spark is not None:
        to = f"master('{ranks.master}')"
        if ranks.place == "connect":
            to = f"remote('{ranks.url}')"
        session = textwrap.dedent(
            f"""
            from pyspark.sql import SparkSession
            builder = SparkSession.builder.{to}
            spark = builder.config("spark.ui.enabled", "false").getOrCreate()
            """
        )
    size = 2 if ranks.spark is not None else -2
    script = f"{session}\nfrom horovod_runner import HorovodRunner\n"
    script += f"from tests.contract.test_end import family\nHorovodRunner(np={size}).run(family)\n"
    with subprocess.Popen(
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
            _, alive = psutil.wait_procs(processes, timeout=15)
            assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
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
