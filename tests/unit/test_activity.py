"""What the system's counters tell of a process; real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from horovod_runner.activity import Activity
from horovod_runner.messages import Alive

_INTERVAL = 0.25


def watch(code: str, done: Callable[[Alive], bool], between: Callable[[int], None]) -> Alive:
    """Look at a process until ``done``; calls ``between`` with its pid once it runs."""
    with subprocess.Popen(
        [sys.executable, "-c", f"print('up', flush=True)\n{code}"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            between(process.pid)
            activity = Activity(process.pid, _INTERVAL)
            told = activity.told()
            for _ in range(100):
                threading.Event().wait(_INTERVAL)
                activity.look()
                told = activity.told()
                if done(told):
                    break
            return told
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()


def nothing(_: int) -> None:
    return


def test_a_process_that_waits_becomes_idle() -> None:
    told = watch("import threading; threading.Event().wait()", lambda a: a.idle > 1, nothing)
    assert told.idle > 1
    assert not told.frozen


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import threading\n"
        "def spin():\n    while True: pass\n"
        "thread = threading.Thread(target=spin)\nthread.start()\nthread.join()",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])",
    ],
    ids=["main thread", "another thread", "child"],
)
def test_a_process_that_computes_is_not_idle(code: str) -> None:
    told = watch(code, lambda alive: alive.quiet > 2, nothing)
    assert told.quiet > 2
    assert told.idle < told.quiet - 1


def test_a_stopped_process_is_frozen() -> None:
    def stop(pid: int) -> None:
        subprocess.run(["kill", f"-{signal.SIGSTOP.value}", str(pid)], check=True)

    assert watch("while True: pass", lambda alive: alive.frozen, stop).frozen


def test_a_process_that_has_ended_is_no_error() -> None:
    told = watch("", lambda alive: alive.quiet > 1, nothing)
    assert not told.frozen
