"""Warm starts: from the second run on ranks are forked, and see nothing of earlier runs."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_runner import CancelledError, HorovodRunner, Limits, RankFailedError
from horovod_runner.host.processes import wait_for_end
from horovod_runner.host.scratch import RunFolder
from horovod_runner.results import registry
from horovod_runner.task.warm import client, protocol
from tests.conftest import Ranks, is_forked, own_processes
from tests.conftest import fork_servers as servers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left", "no_servers_left")]


@pytest.fixture
def no_servers_left() -> Iterator[None]:
    """End the fork servers, before and after: their sessions last longer than a test."""
    end_servers()
    yield
    end_servers()


def end_servers() -> None:
    for folder in Path(tempfile.gettempdir()).glob("horovod_runner-*/warm-*"):
        with suppress(OSError), protocol.connect(folder, 1.0) as connection:
            connection.send(protocol.END)
    assert wait_for_end(servers(), 20) == []


def random_numbers() -> tuple[bool, list[float]]:
    """Whether this process was forked, and random numbers of several libraries."""
    import multiprocessing

    import numpy
    import pandas  # imports numpy.random, so the fork server has its generator
    import torch

    assert pandas
    key = int.from_bytes(multiprocessing.current_process().authkey, "big")
    drawn = [random.random(), numpy.random.rand(), torch.rand([]).item(), key]
    return is_warm(), drawn


def on_all_ranks(main: Any) -> Any:
    """A main that returns the values of all ranks."""

    def everywhere() -> Any:
        import horovod.torch as hvd

        hvd.init()
        return hvd.allgather_object(main())

    return everywhere


def is_warm() -> bool:
    """Whether this process was forked; imports NumPy, for the next run's fork server."""
    import numpy

    assert numpy
    return is_forked(psutil.Process().parent())


def prepare(ranks: Ranks, size: int = 1, **options: Any) -> HorovodRunner:
    """A runner whose next run starts warm."""
    runner = ranks.runner(size, preload_frameworks=True, **options)
    assert not runner.run(is_warm)
    return runner


def check_warm(runner: HorovodRunner, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """The next run starts warm and says so, and the one after it uses the same fork servers."""
    assert runner.run(is_warm)
    assert "start: warm\n" in capsys.readouterr().err
    started = servers()
    assert len(started) == (2 if ranks.place == "cluster" else 1)
    assert runner.run(is_warm)
    assert servers() == started


@pytest.mark.places("local", "spark", "cluster")
def test_the_second_run_starts_warm_and_says_so(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    # On the cluster these are all slots of both executors, and each executor has a fork server.
    runner = prepare(ranks, size=4)
    first = capsys.readouterr().err
    assert "start: cold on ranks 0-3 (there is no fork server yet" in first
    check_warm(runner, ranks, capsys)


@pytest.mark.places("local", "spark", "cluster")
def test_with_names_of_frameworks_the_first_run_starts_warm_too(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    check_warm(ranks.runner(4, preload_frameworks=["numpy"]), ranks, capsys)


@pytest.mark.places("local")
def test_only_the_named_frameworks_are_preloaded(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ranks.runner(1, preload_frameworks=["numpy"])
    assert not runner.run(was_preloaded, name="pandas")
    assert not runner.run(was_preloaded, name="pandas")
    assert ranks.run(1, was_preloaded, {"preload_frameworks": ["pandas"]}, name="pandas")
    # pandas has imported numpy, too, so this fork server is good for both.
    started = servers()
    assert ranks.run(1, was_preloaded, {"preload_frameworks": ["numpy", "pandas"]}, name="numpy")
    assert servers() == started
    assert runner.run(set_late, name="A_SETTING")
    assert "A_SETTING" not in capsys.readouterr().out


@pytest.mark.places("local")
def test_a_framework_that_cannot_be_imported_makes_the_start_cold(
    ranks: Ranks,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sklearn.py").write_text("import not_a_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    runner = ranks.runner(1, preload_frameworks=["sklearn"])
    assert not runner.run(is_warm)
    error = capsys.readouterr().err
    assert "start: cold" in error
    assert "the fork server cannot import sklearn: ModuleNotFoundError" in error


@pytest.mark.places("local")
def test_without_preload_frameworks_there_is_no_fork_server(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [ranks.run(1, is_warm) for _ in range(2)] == [False, False]
    assert not servers()
    assert "start:" not in capsys.readouterr().err


@pytest.mark.places("local")
@pytest.mark.horovod
def test_forked_ranks_train_together_and_draw_different_random_numbers(ranks: Ranks) -> None:
    runner = ranks.runner(2, preload_frameworks=True)
    main = on_all_ranks(random_numbers)
    drawn = []
    for was_warm in (False, True, True):
        for forked, numbers in runner.run(main):
            assert forked == was_warm
            drawn += numbers
    assert len(set(drawn)) == 3 * 2 * 4


def leave_traces() -> None:
    """Change the process in many ways, as a careless main might."""
    import numpy

    os.environ["LEFT_BEHIND"] = "1"
    sys.path.insert(0, "/left/behind")
    sys.argv.append("--left-behind")
    sys.modules["left_behind"] = sys
    numpy.left_behind = True  # type: ignore[attr-defined]
    numpy.seterr(all="raise")
    os.chdir("/")
    os.umask(0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.dup(0)


def traces() -> dict[str, Any]:
    import numpy

    return {
        "environment": os.environ.get("LEFT_BEHIND"),
        "path": "/left/behind" in sys.path,
        "arguments": "--left-behind" in sys.argv,
        "modules": "left_behind" in sys.modules,
        "attributes": hasattr(numpy, "left_behind"),
        "numpy": numpy.geterr(),
        "folder": os.getcwd(),
        "umask": os.umask(0o22),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "signals": signal.getsignal(signal.SIGUSR1),
        "threads": threading.active_count(),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name[:2] != "__"),
        "group": os.getpgid(0) == os.getpid(),
        "streams": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdin.read()],
        "memory": Path("/proc/self/oom_score_adj").read_text(),
        "cores": os.sched_getaffinity(0),
        "collects garbage": gc.isenabled(),
    }


def test_a_run_sees_nothing_of_the_run_before(ranks: Ranks) -> None:
    before = ranks.run(1, traces)
    runner = prepare(ranks)
    runner.run(leave_traces)
    assert runner.run(traces) == before
    assert runner.run(is_warm)


def set_late(name: str) -> bool:
    import numpy

    was_warm = is_warm()
    os.environ[name] = "another"
    import pandas

    assert numpy.__version__
    assert pandas.__version__
    return was_warm


@pytest.mark.places("local")
def test_modules_that_main_imports_after_setting_a_variable_are_not_preloaded(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ranks.runner(1, preload_frameworks=True)
    assert not runner.run(set_late, name="A_SETTING")
    notice = capsys.readouterr().out
    assert re.search("sets A_SETTING before it imports .*pandas.*does not preload them", notice)
    assert "env={'A_SETTING': ...}" in notice
    assert runner.run(set_late, name="A_SETTING")
    assert runner.run(is_warm)


def set_in_a_library(name: str) -> bool:
    text = f"import os; os.environ[{name!r}] = '1'"
    exec(compile(text, f"{sys.prefix}/site-packages/library.py", "exec"))
    return is_warm()


def clear_variables_for_a_while(name: str) -> bool:
    """As Accelerate does in Hugging Face's Trainer."""
    assert name not in os.environ
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    return is_warm()


@pytest.mark.places("local")
def test_only_a_variable_that_main_sets_too_late_in_a_forked_rank_is_reported(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, name = prepare(ranks), "OPENBLAS_NUM_THREADS"
    for harmless in (set_in_a_library, clear_variables_for_a_while):
        assert runner.run(harmless, name=name)
    assert "too late" not in capsys.readouterr().out
    assert runner.run(set_late, name=name)
    assert f"main sets {name} too late: this rank was fork" in capsys.readouterr().out


def descriptors() -> tuple[bool, list[str]]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{name}")))
    return is_warm(), sorted(links)


def variables() -> tuple[bool, dict[str, str]]:
    of_a_run = ("HOROVOD_RUNNER_", "HOROVOD_GLOO_RENDEZVOUS_", "MASTER_PORT", "PMI_FD")
    others = {name: value for name, value in os.environ.items() if not name.startswith(of_a_run)}
    return is_warm(), others


@pytest.mark.parametrize("seen", [descriptors, variables])
def test_a_forked_rank_has_what_a_cold_one_has(
    ranks: Ranks, seen: Callable[[], tuple[bool, Any]]
) -> None:
    runner = ranks.runner(1, preload_frameworks=True)
    cold, forked = runner.run(seen), runner.run(seen)
    assert (cold[0], forked[0]) == (False, True)
    assert cold[1] == forked[1]


# Slow: cold starts are the subject.
@pytest.mark.places("local")
def test_other_settings_start_cold_and_the_latest_two_stay_warm(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_setting(value: str) -> HorovodRunner:
        env = {"A_SETTING_THAT_AN_IMPORT_MAY_READ": value}
        return ranks.runner(1, preload_frameworks=True, env=env)

    first, second, third = prepare(ranks), with_setting("2"), with_setting("3")
    assert first.run(is_warm)
    before = servers()
    assert not second.run(is_warm)
    assert "the fork server has other settings" in capsys.readouterr().err
    (server,) = (each for each in servers() if each not in before)
    assert [runner.run(is_warm) for runner in (second, first)] == [True, True]
    assert not third.run(is_warm)
    assert wait_for_end([server], 20) == []
    assert [runner.run(is_warm) for runner in (third, first)] == [True, True]
    assert len(servers()) == 2


def stall_and_fusion() -> tuple[bool, list[str | None]]:
    names = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_FUSION_THRESHOLD")
    return is_warm(), [os.environ.get(name) for name in names]


@pytest.mark.places("local")
def test_settings_that_no_import_reads_are_those_of_the_run_and_need_no_other_fork_server(
    ranks: Ranks,
) -> None:
    assert prepare(ranks).run(is_warm)
    server = servers()
    tuned = ranks.runner(
        1, preload_frameworks=True, hang_timeout=12, env={"HOROVOD_FUSION_THRESHOLD": "1000"}
    )
    assert tuned.run(stall_and_fusion) == (True, ["2", "1000"])
    plain = ranks.runner(1, preload_frameworks=True, hang_timeout=6)
    assert plain.run(stall_and_fusion) == (True, ["1", None])
    assert servers() == server


def was_preloaded(name: str) -> bool:
    preloaded = name in sys.modules
    importlib.import_module(name)
    return preloaded


@pytest.mark.places("local")
def test_a_fork_server_that_is_ending_does_not_hide_the_one_in_its_place(ranks: Ranks) -> None:
    runner = prepare(ranks)
    (folder,) = Path(tempfile.gettempdir()).glob("horovod_runner-*/warm-*")
    name = folder.name.rpartition("-")[0]
    with RunFolder(f"{name}-ending", folder.parents[1]):  # its socket is gone already
        assert runner.run(is_warm)


@pytest.mark.places("local")
def test_a_new_fork_server_also_preloads_what_a_later_run_imports(ranks: Ranks) -> None:
    runner = prepare(ranks)
    assert not runner.run(was_preloaded, name="pandas")
    assert runner.run(was_preloaded, name="pandas")
    assert len(servers()) == 1


@pytest.mark.places("local")
def test_the_users_modules_are_imported_again_in_each_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("import numpy\nvalue = 1\n")

    def value() -> int:
        import own_module  # type: ignore[import-not-found]

        return int(own_module.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        runner = ranks.runner(1, preload_frameworks=True)
        assert runner.run(value) == 1
        (tmp_path / "own_module.py").write_text("import numpy\nvalue = 22\n")
        assert runner.run(value) == 22


def fail(how: str) -> None:
    import numpy

    numpy.zeros(1)
    print("the last words")
    if how == "raise":
        raise ValueError("odd")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("kill", -9)])
def test_a_forked_rank_fails_as_a_cold_one(ranks: Ranks, how: str, code: int) -> None:
    if how != "kill" and ranks.place == "spark":
        pytest.skip("local ranks are enough")
    runner = prepare(ranks)
    with pytest.raises((ValueError, RankFailedError)) as caught:
        runner.run(fail, how=how)
    error = caught.value
    cause = error if isinstance(error, RankFailedError) else error.__cause__
    assert isinstance(cause, RankFailedError)
    assert cause.exit_code == code
    assert "the last words" in str(cause)
    assert runner.run(is_warm)


def end_guard() -> None:
    import numpy

    numpy.zeros(1)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


@pytest.mark.places("local")
def test_a_forked_rank_ends_with_its_guard(ranks: Ranks) -> None:
    runner = prepare(ranks)
    with pytest.raises(RankFailedError) as caught:
        runner.run(end_guard)
    assert caught.value.exit_code == -signal.SIGKILL
    (orphan,) = own_processes("sleep")  # its guard was killed, so nothing ends it
    orphan.kill()


@pytest.mark.places("local")
def test_a_killed_fork_server_is_replaced(ranks: Ranks) -> None:
    runner = prepare(ranks)
    (server,) = servers()
    server.kill()
    assert wait_for_end([server], 20) == []
    assert not runner.run(is_warm)
    assert runner.run(is_warm)


@pytest.mark.places("local")
def test_an_idle_fork_server_ends(ranks: Ranks) -> None:
    prepare(ranks, limits=Limits(fork_server_idle=0.1))
    assert wait_for_end(servers(), 20) == []
    assert not list(Path(tempfile.gettempdir()).glob("horovod_runner-*/warm-*"))


@pytest.mark.places("local")
def test_a_fork_server_that_hangs_delays_a_run_only_briefly(ranks: Ranks) -> None:
    # The wait is longer than the time after which a silent rank counts as lost: a waiting rank
    # sends heartbeats.
    hasty = prepare(ranks, limits=Limits(silent_task=3, fork_server=5))
    runner = ranks.runner(1, preload_frameworks=True)
    assert runner.run(is_warm)
    (server,) = servers()
    server.suspend()
    assert not hasty.run(is_warm)
    assert wait_for_end([server], 20) == []
    assert runner.run(is_warm)
    assert len(servers()) == 1


@pytest.mark.places("local")
def test_a_run_can_be_cancelled_while_its_ranks_wait_for_a_fork_server(ranks: Ranks) -> None:
    runner = prepare(ranks)
    (server,) = servers()
    server.suspend()
    cancel = threading.Timer(2.0, runner.cancel)
    cancel.start()
    with pytest.raises(CancelledError):
        runner.run(is_warm)
    cancel.join()
    server.resume()
    assert runner.run(is_warm)


@pytest.mark.places("local")
def test_a_run_succeeds_although_no_fork_server_can_be_started(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    # Where no process can be started the rank itself cannot be started either.
    monkeypatch.setattr(client.ForkServer, "_start", no_memory)
    runner = ranks.runner(1, preload_frameworks=True)
    assert not runner.run(is_warm)
    assert not runner.run(is_warm)


@pytest.mark.places("local")
def test_a_fork_that_no_task_waits_for_leaves_nothing_behind(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = prepare(ranks)
    assert runner.run(is_warm)
    (server,) = servers()
    before = server.num_fds()

    def give_up(*_: object) -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("socket.recv_fds", give_up)
        assert not runner.run(is_warm)
    assert runner.run(is_warm)
    assert wait_for_end(server.children(), 20) == []
    (folder,) = Path(tempfile.gettempdir()).glob("horovod_runner-*/warm-*")
    with protocol.connect(folder, 20.0) as connection:  # requests are answered in order
        connection.send(b"nonsense")
        assert not connection.recv(1)
    assert server.num_fds() == before
    assert servers() == [server]


@pytest.mark.places("local")
def test_descriptors_above_1023_work_and_another_umask_starts_cold(ranks: Ranks) -> None:
    runner = prepare(ranks)
    with ExitStack() as held:
        for _ in range(1100):
            held.enter_context(open(os.devnull))
        assert runner.run(is_warm)
        held.callback(os.umask, os.umask(0o27))
        assert not runner.run(is_warm)


DRIVER = """
import sys, threading
from horovod_runner import ClusterConfig, HorovodRunner

def main(wait):
    import numpy
    print("up", flush=True)
    if wait:
        threading.Event().wait()

runner = HorovodRunner(np=-1, cluster_config=ClusterConfig(preload_frameworks=True))
runner.run(main, wait=False)
runner.run(main, wait=True)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver in the middle of its second run, which started warm."""
    temporary = tmp_path / ("a-path-that-is-too-long-for-the-address-of-a-socket" * 2)
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    with process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_the_fork_server_and_the_forked_ranks_end_with_a_killed_driver(
    driver: subprocess.Popen[str],
) -> None:
    running = [*servers(), *(child for server in servers() for child in server.children())]
    assert len(running) == 2
    driver.kill()
    assert wait_for_end(running, 20) == []


def test_forked_ranks_are_listed_and_stopped_as_cold_ones(driver: subprocess.Popen[str]) -> None:
    (listed,) = [run for run in registry.find() if run.entry and run.entry.pid == driver.pid]
    (server,) = servers()
    forked = server.children(recursive=True)
    assert {process.pid for process in forked} <= set(listed.processes)
    assert server.pid not in listed.processes
    assert registry.stop(listed, 20) == ""
    assert wait_for_end(forked, 20) == []
