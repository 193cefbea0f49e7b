"""A worker process on its own: files, pipes, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from horovod_runner.handover import WorkerJob, WorkerOutcome
from horovod_runner.process import WorkerProcess, describe_exit, inherited_environment


def job(main: object, rank: int = 0, **kwargs: object) -> WorkerJob:
    pickled = cloudpickle.dumps((main, kwargs))
    return WorkerJob(rank, pickled, sys.path, ["script", "--flag"])


def finish(worker: WorkerProcess) -> WorkerOutcome | None:
    assert worker.exit_descriptor is not None
    assert select.select([worker.exit_descriptor], [], [], 60)[0]
    return worker.outcome()


def test_a_worker_leaves_its_value_and_its_output() -> None:
    def main(x: int) -> list[str]:
        print("out", x)
        print("err", file=sys.stderr)
        return sys.argv

    with WorkerProcess(job(main, x=3), {}) as worker:
        said = finish(worker)
        assert said is not None
        assert said.ok
        assert cloudpickle.loads(said.value) == ["script", "--flag"]
        assert worker.exit_code == 0
        assert os.read(worker.stdout, 100) == b"out 3\n"
        assert os.read(worker.stderr, 100) == b"err\n"


def _read_input() -> str:
    return sys.stdin.read()


def test_input_is_empty() -> None:
    with WorkerProcess(job(_read_input), {}) as worker:
        said = finish(worker)
        assert said is not None
        assert cloudpickle.loads(said.value) == ""


def test_a_worker_that_dies_without_a_word_leaves_none() -> None:
    with WorkerProcess(job(lambda: os._exit(7)), {}) as worker:
        assert finish(worker) is None
        assert worker.exit_code == 7


def test_closing_ends_a_worker_that_ignores_sigterm() -> None:
    def main() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(1000)

    worker = WorkerProcess(job(main), {})
    assert select.select([worker.stdout], [], [], 60)[0]
    worker.close()
    worker.close()
    assert worker.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(worker.pid)


def test_a_worker_dies_with_its_parent() -> None:
    script = textwrap.dedent(
        """
        import select, time
        from horovod_runner.process import WorkerProcess
        from tests.unit.test_process import job, wait_for_ever

        worker = WorkerProcess(job(wait_for_ever), {})
        select.select([worker.stdout], [], [])
        print(worker.pid, flush=True)
        time.sleep(1000)
        """
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    with contextlib.suppress(psutil.TimeoutExpired):
        worker.wait(timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def wait_for_ever() -> None:
    print("waiting", flush=True)
    time.sleep(1000)


def test_a_worker_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        WorkerProcess(job(print), {}, directory=str(tmp_path / "missing"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_sparks_secrets_are_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "hush")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "outer:1/run")
    monkeypatch.setenv("OTHER", "kept")
    environment = inherited_environment()
    assert environment["OTHER"] == "kept"
    assert "hush" not in environment.values()
    assert "outer:1/run" not in environment.values()


def test_sparks_own_classes_are_no_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # A package of the user's may well come in a jar: those stay.
    path = ["/app", "/spark/jars/spark-core_2.12-3.5.9.jar", "/jars/graphframes.jar"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    assert inherited_environment()["PYTHONPATH"] == os.pathsep.join([path[0], path[2]])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (-9, "killed by SIGKILL (often the out-of-memory killer: look at the host's memory)"),
        (-6, "killed by SIGABRT (Horovod aborts so when a rank fails inside hvd.init())"),
        (-10, "killed by SIGUSR1"),
        (-70, "killed by signal 70"),
    ],
)
def test_an_exit_code_is_put_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
