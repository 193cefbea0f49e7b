"""How long a process has been idle, by the system's counters; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from horovod_runner.task.activity import Activity
from horovod_runner.wire.messages import Alive

_INTERVAL = 0.25


def measure_until(
    code: str,
    done: Callable[[Alive], bool],
    started: Callable[[int], None] = lambda pid: None,
) -> Alive:
    """Measure a process until ``done``; calls ``started`` with its pid once it runs."""
    with subprocess.Popen(
        [sys.executable, "-c", f"print('up', flush=True)\n{code}"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            started(process.pid)
            activity = Activity(process.pid, _INTERVAL)
            alive = activity.heartbeat()
            for _ in range(100):
                threading.Event().wait(_INTERVAL)
                activity.measure()
                alive = activity.heartbeat()
                if done(alive):
                    break
            return alive
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()


def test_a_waiting_process_becomes_idle() -> None:
    alive = measure_until("import threading; threading.Event().wait()", lambda a: a.idle > 1)
    assert alive.idle > 1
    assert not alive.frozen


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
def test_a_computing_process_is_not_idle(code: str) -> None:
    alive = measure_until(code, lambda a: a.quiet > 3)
    assert alive.quiet > 3
    assert alive.idle < alive.quiet - 1


@pytest.mark.parametrize(
    ("work", "idle"),
    [("pass", False), ("time.sleep(0.001)", True)],  # Horovod's threads look about as often
    ids=["computes", "polls"],
)
def test_a_thread_on_a_crowded_core_is_judged_by_what_it_does_with_it(
    work: str, idle: bool
) -> None:
    core = min(os.sched_getaffinity(0))
    crowd: list[subprocess.Popen[bytes]] = []

    def crowd_its_core(pid: int) -> None:
        for _ in range(12):
            crowd.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {core})
        for process in crowd:
            os.sched_setaffinity(process.pid, {core})

    code = (
        f"import threading, time\ndef run():\n    while True: {work}\n"
        "thread = threading.Thread(target=run)\nthread.start()\nthread.join()"
    )
    try:
        alive = measure_until(code, lambda a: a.quiet > 3, crowd_its_core)
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    assert (alive.idle > 1) == idle


def test_a_stopped_process_is_frozen() -> None:
    def stop(pid: int) -> None:
        subprocess.run(["kill", f"-{signal.SIGSTOP.value}", str(pid)], check=True)

    assert measure_until("while True: pass", lambda a: a.frozen, stop).frozen


def test_an_ended_process_is_no_error() -> None:
    assert not measure_until("", lambda a: a.quiet > 1).frozen
