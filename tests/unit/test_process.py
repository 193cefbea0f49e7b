"""A single worker process: its files, its pipes, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.options import ClusterConfig, Options
from horovod_runner.host.processes import wait_for_end
from horovod_runner.run.pickling import pickle_call
from horovod_runner.task.process import WorkerProcess, describe_exit
from horovod_runner.wire.job_file import LEFT_VARIABLE, PMI_VARIABLE, WorkerJob, WorkerOutcome
from tests.programs import Program
from tests.unkillable import await_waiting, unkillable


def job(main: object, rank: int = 0, limits: Limits = DEFAULTS, **kwargs: object) -> WorkerJob:
    pickled = pickle_call(main, kwargs)
    options = Options(np=-1, cluster_config=ClusterConfig(limits=limits))
    return WorkerJob(rank, 1, options, pickled, sys.path, ["script", "--flag"])


def finish(worker: WorkerProcess) -> WorkerOutcome | None:
    assert worker.exit_descriptor is not None
    assert select.select([worker.exit_descriptor], [], [], 60)[0]
    return worker.outcome()


def value_of(worker: WorkerProcess) -> Any:
    """What main returns."""
    outcome = finish(worker)
    assert outcome is not None
    assert outcome.ok
    return cloudpickle.loads(outcome.value)


def await_output(worker: WorkerProcess) -> bytes:
    """What a worker prints first."""
    assert select.select([worker.stdout], [], [], 60)[0]
    return os.read(worker.stdout, 1000)


def test_a_worker_returns_its_value_and_its_output_and_has_no_input() -> None:
    def main(x: int) -> list[str]:
        print("out", x)
        print("err", file=sys.stderr)
        return [*sys.argv, sys.stdin.read()]

    with WorkerProcess(job(main, x=3), {}) as worker:
        assert value_of(worker) == ["script", "--flag", ""]
        assert worker.exit_code == 0
        assert os.read(worker.stdout, 100) == b"out 3\n"
        assert os.read(worker.stderr, 100) == b"err\n"


def test_a_worker_that_dies_at_once_has_no_outcome() -> None:
    with WorkerProcess(job(lambda: os._exit(7)), {}) as worker:
        assert finish(worker) is None
        assert worker.exit_code == 7


def test_closing_ends_a_worker_that_ignores_sigterm() -> None:
    def main() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ignores SIGTERM", flush=True)
        time.sleep(1000)

    worker = WorkerProcess(job(main), {})
    await_output(worker)
    worker.close()
    worker.close()
    assert worker.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(worker.pid)


def family() -> None:
    """A worker with a child in its group, a daemon in another session, and a stubborn child."""
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
    children = [subprocess.Popen(["sleep", "1000"])]
    children += [subprocess.Popen(["sleep", "1000"], start_new_session=True)]
    children += [subprocess.Popen([sys.executable, "-c", stubborn])]
    pids = [os.getpid(), *(child.pid for child in children)]
    os.write(1, (" ".join(map(str, pids)) + "\n").encode())  # in a single write
    threading.Event().wait()


def read_family(worker: WorkerProcess) -> list[psutil.Process]:
    return [psutil.Process(int(pid)) for pid in await_output(worker).split()]


def assert_gone(processes: list[psutil.Process]) -> None:
    assert wait_for_end(processes, 10) == []


def test_a_process_that_nobody_has_reaped_has_ended_and_a_stopped_one_has_not() -> None:
    with subprocess.Popen(["sleep", "1000"]) as stopped, subprocess.Popen(["true"]) as unreaped:
        try:
            processes = [psutil.Process(stopped.pid), psutil.Process(unreaped.pid)]
            processes[0].suspend()
            os.waitid(os.P_PID, unreaped.pid, os.WEXITED | os.WNOWAIT)
            assert wait_for_end(processes, 0.1) == processes[:1]
        finally:
            stopped.kill()
        assert wait_for_end(processes, 10) == []


def test_the_workers_processes_end_with_the_task() -> None:
    script = textwrap.dedent(
        """
        import os, select, threading
        from horovod_runner.task.process import WorkerProcess
        from tests.unit.test_process import family, job

        worker = WorkerProcess(job(family), {})
        select.select([worker.stdout], [], [])
        print(os.read(worker.stdout, 1000).decode(), flush=True)
        threading.Event().wait()
        """
    )
    command = [sys.executable, "-c", script]
    with Program(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        guards = [processes[0].parent()]
        parent.kill()
    assert len(pids) == 4
    assert_gone(processes + guards)


@pytest.mark.parametrize("way", ["close", "kill", "the worker ends"])
def test_the_workers_processes_end_with_it(way: str) -> None:
    with WorkerProcess(job(family), {}) as worker:
        processes = read_family(worker)
        if way == "close":
            worker.close()
        elif way == "kill":
            worker.kill()
        else:
            processes[0].kill()
        assert_gone(processes)


def test_a_worker_and_its_group_end_although_the_guard_was_killed() -> None:
    with WorkerProcess(job(family), {}) as worker:
        processes = read_family(worker)
        own_session = processes.pop(2)
        processes[0].parent().kill()
        assert_gone(processes[:1])
    assert_gone(processes)
    own_session.kill()  # nothing can find it


def look(path: Path) -> None:
    print("looks", flush=True)
    path.exists()


def test_a_worker_that_no_signal_ends_is_left_behind() -> None:
    with (
        unkillable() as path,
        WorkerProcess(job(look, limits=Limits(killed_end=0.2), path=path), {}) as worker,
    ):
        await_output(worker)
        await_waiting([worker.pid])
        worker.kill()
        assert finish(worker) is None
        assert worker.exit_code == -signal.SIGKILL
        assert f"{worker.pid} (" in worker.left_behind
        assert "state D" in worker.left_behind
    with suppress(psutil.NoSuchProcess):
        assert_gone([psutil.Process(worker.pid)])


def test_a_process_that_no_signal_ends_does_not_keep_a_worker_that_has_returned() -> None:
    def main(path: Path) -> int:
        # In another session, below a process that SIGKILL ends.
        between = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        stat = f"import os; print(os.getpid(), flush=True); os.stat('{path}')"
        command = [sys.executable, "-c", between, sys.executable, "-c", stat]
        child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        await_waiting([pid])
        return pid

    with (
        unkillable() as path,
        WorkerProcess(job(main, limits=Limits(killed_end=0.2), path=path), {}) as worker,
    ):
        pid = value_of(worker)
        assert worker.exit_code == 0
        assert f"{pid} (" in worker.left_behind


def test_a_stopped_guard_does_not_keep_its_worker() -> None:
    with WorkerProcess(job(family, limits=Limits(guard_end=0.1)), {}) as worker:
        processes = read_family(worker)
        own_session = processes.pop(2)
        os.kill(worker.guard, signal.SIGSTOP)
        while worker.exit_code is None:
            worker.kill()
            time.sleep(0.05)
        assert worker.exit_code == -signal.SIGKILL
    assert_gone(processes)
    own_session.kill()  # nothing can find it


def test_a_group_that_has_the_id_of_an_ended_worker_is_not_killed() -> None:
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root chooses the next process id")

    def main() -> None:
        os.kill(os.getpid(), signal.SIGKILL)  # its guard has nothing else to do

    with WorkerProcess(job(main), {}) as worker:
        finish(worker)
        assert worker.exit_code == -signal.SIGKILL
        while True:
            last.write_text(str(worker.pid - 1))
            other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
            if other.pid == worker.pid:
                break
            other.communicate()  # another process of this machine was quicker
    other.communicate()
    assert other.returncode == 0


def test_terminate_reaches_the_workers_children() -> None:
    def main() -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        print(subprocess.Popen(["sleep", "1000"]).wait(), flush=True)

    with WorkerProcess(job(main), {}) as worker:
        assert worker.pid
        while not psutil.Process(worker.pid).children():
            pass
        worker.terminate()
        assert value_of(worker) is None
        assert os.read(worker.stdout, 100) == b"-15\n"


def test_pid_is_the_workers_and_not_the_guards() -> None:
    with WorkerProcess(job(os.getpid), {}) as worker:
        assert value_of(worker) == worker.pid


def test_a_worker_that_cannot_start_leaves_no_descriptors_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        WorkerProcess(job(print), {}, directory=str(tmp_path / "missing"))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (-9, "killed by SIGKILL (often the out-of-memory killer: check the host's memory)"),
        (
            -6,
            "killed by SIGABRT (native code gave up: MPI or Gloo, in hvd.init() or when another "
            "rank is lost)",
        ),
        (-10, "killed by SIGUSR1"),
        (-70, "killed by signal 70"),
    ],
)
def test_exit_codes_are_described(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize("end", ["returns", "is killed", "is closed"])
def test_leftover_files_are_removed_however_the_worker_ended(tmp_path: Path, end: str) -> None:
    leftovers = [tmp_path / "segment", tmp_path / "another", tmp_path / "missing"]
    for path in leftovers[:2]:
        path.touch()

    def main() -> None:
        assert LEFT_VARIABLE not in os.environ
        print("started", flush=True)
        if end != "returns":
            time.sleep(1000)

    variables = {LEFT_VARIABLE: os.pathsep.join(map(str, leftovers))}
    with WorkerProcess(job(main), variables) as worker:
        await_output(worker)
        if end == "is killed":
            os.kill(worker.pid, signal.SIGKILL)
        if end != "is closed":
            finish(worker)
            assert worker.exit_code == (0 if end == "returns" else -signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_workers_mpi_has_a_socket_for_its_requests() -> None:
    def main() -> str:
        import socket

        pmi = socket.socket(fileno=int(os.environ[PMI_VARIABLE]))
        assert not os.get_inheritable(pmi.fileno())  # its children are not ranks
        pmi.sendall(b"cmd=init\n")
        return pmi.recv(100).decode()

    with WorkerProcess(job(main), {}, mpi=True) as worker:
        assert worker.pmi is not None
        assert worker.pmi.recv(100) == b"cmd=init\n"
        worker.pmi.sendall(b"cmd=answer\n")
        assert value_of(worker) == "cmd=answer\n"
        assert worker.pmi.recv(100) == b""  # no other process holds it


@pytest.mark.timeout(60)  # seconds; the end of the block waits for a program that nobody ends
def test_no_program_outlives_a_test_that_fails() -> None:
    with pytest.raises(KeyError), Program(["sleep", "1000"]) as program:
        raise KeyError
    assert program.returncode == -signal.SIGKILL
