"""Every way to fail: the right rank, what happened to it, and nobody left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_runner import (
    LaunchError,
    RankFailedError,
    log_to_driver,
    report,
)
from horovod_runner.host.processes import wait_for_end
from horovod_runner.task import task
from horovod_runner.wire.link import Link
from horovod_runner.worker import context
from tests.conftest import Ranks
from tests.control_groups import memory_limit
from tests.programs import run_python

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


def fail(ranks: Ranks, main: Any, **kwargs: Any) -> RankFailedError:
    """Run what fails on rank 1 of two; returns the cause."""

    def alone() -> None:
        print("the last words")
        if os.environ["HOROVOD_RANK"] == "1":
            main(**kwargs)
        threading.Event().wait()

    with pytest.raises(Exception, match=r"(?s).*") as caught:
        ranks.run(2, alone)
    error = caught.value
    cause = error if isinstance(error, RankFailedError) else error.__cause__
    assert isinstance(cause, RankFailedError)
    assert cause.rank == 1
    assert cause.pid
    assert "the last words" in str(cause)
    return cause


def leave(code: int) -> None:
    os._exit(code)  # coverage.py puts a function that cannot be pickled in its place


@pytest.mark.parametrize(
    ("main", "code", "told"),
    [
        (partial(ctypes.string_at, 0), -signal.SIGSEGV, "SIGSEGV"),
        (os.abort, -signal.SIGABRT, "SIGABRT"),
        (partial(leave, 7), 7, "exit code 7"),
        (partial(leave, 0), 0, "exit code 0"),
    ],
    ids=["segfault", "abort", "exit 7", "exit 0"],
)
def test_a_process_that_ends_by_itself_is_told_by_its_exit(
    ranks: Ranks, main: Any, code: int, told: str
) -> None:
    cause = fail(ranks, main)
    assert cause.exit_code == code
    assert told in str(cause)
    if code == -signal.SIGSEGV:
        assert "ctypes" in str(cause)  # the stack that faulthandler printed


class StubbornError(Exception):
    """It cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("as stubborn as can be")
        self.lock = threading.Lock()


def use_up_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 31)


def raise_what_cannot_be_pickled() -> None:
    raise StubbornError


def close_the_output() -> None:
    sys.stdout.close()
    os.close(1)
    os.close(2)
    raise ValueError("said in silence")


def print_what_is_no_utf8() -> None:
    os.write(1, b"caf\xe9 \xff\n")
    raise ValueError("after all that")


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (use_up_memory, "MemoryError"),
        (raise_what_cannot_be_pickled, "StubbornError: as stubborn as can be"),
        (close_the_output, "said in silence"),
        (print_what_is_no_utf8, "caf\ufffd \ufffd"),
    ],
    ids=["memory", "pickle", "output", "utf8"],
)
def test_a_strange_end_is_still_told(ranks: Ranks, main: Any, told: str) -> None:
    assert told in str(fail(ranks, main))


def test_the_out_of_memory_killer_is_named(ranks: Ranks) -> None:
    def main(members: Path) -> None:
        members.write_text(str(os.getpid()))
        hoard = [b"x" * (1 << 20) for _ in range(1000)]
        raise AssertionError(len(hoard))

    with memory_limit(200 << 20) as members:
        cause = fail(ranks, main, members=members)
    assert cause.exit_code == -signal.SIGKILL
    assert "SIGKILL (the kernel's out-of-memory killer)" in str(cause)
    assert "before the end, " in str(cause)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk of a known size can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_named_and_costs_nothing_but_what_it_cannot_hold(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("large_disk")
    script = """
        import os
        from horovod_runner import DebugConfig, HorovodRunner, RankFailedError, LaunchError
        def trace():
            with open("written", "wb") as file:
                file.write(bytes(30 << 20))
            os.symlink(os.path.abspath("written"), os.environ["HOROVOD_TIMELINE"])
        runner = HorovodRunner(np=-2)
        for number, (main, kwargs) in enumerate([
            (lambda: b"x" * (4 << 20), {}),
            (lambda data: len(data), {"data": bytearray(4 << 20)}),
            (lambda: print("a line of output\\n" * 300_000), {}),
            (trace, {}),
        ]):
            if main is trace:
                debug = DebugConfig(timeline="timeline.json")
                runner = HorovodRunner(np=-1, debug_config=debug)
            try:
                runner.run(main, **kwargs)
                print(f"case {number}: well")
            except (RankFailedError, LaunchError) as error:
                print(f"case {number}: {type(error).__name__} {error}")
        """
    done = run_python(script, cwd=folder, variables={"TMPDIR": str(small_disk)})
    told = [line for line in done.stdout.splitlines() if line.startswith("case ")]
    assert len(told) == 4, done.stderr
    assert told[0] == "case 0: well"
    assert "case 1: LaunchError" in told[1]
    assert "main and its arguments could not be written: [Errno 28]" in told[1]
    assert f" in {small_disk}, where " in told[1]
    assert told[2:] == ["case 2: well", "case 3: well"]
    assert (folder / "timeline.json").stat().st_size >= 30 << 20


def test_a_value_that_finds_no_room_is_told_with_the_limit_of_a_file(ranks: Ranks) -> None:
    def main() -> bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return b"x" * 100_000

    with pytest.raises(
        RankFailedError, match=r"bytes that main returned .* \(ulimit -f\)"
    ) as caught:
        ranks.run(1, main)
    assert caught.value.exit_code == 1


def test_an_exit_code_of_main_is_kept_with_the_last_lines_in_order(ranks: Ranks) -> None:
    def main() -> None:
        for number in range(20):
            print(f"line {number}.")
        sys.exit(3)

    cause = fail(ranks, main)
    assert cause.exit_code == 3
    assert [int(n) for n in re.findall(r"line (\d+)\.", str(cause))] == list(range(20))


@pytest.mark.places("local")
def test_a_last_line_without_its_newline_is_shown_and_is_in_the_error(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        print("loss is nan", end="", flush=True)
        print("giving up", end="", file=sys.stderr, flush=True)
        os._exit(7)

    cause = fail(ranks, main)
    captured = capsys.readouterr()
    assert "loss is nan" in captured.out
    assert "giving up" in captured.err
    assert "loss is nan" in str(cause)
    assert "giving up" in str(cause)


@pytest.mark.places("local")
def test_a_rank_that_writes_into_its_messages_pipes_is_told_and_goes_on(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> str:
        rank = context.current()
        assert rank is not None
        os.write(rank.pipe._descriptor, b"\xff" * 10)
        os.write(rank.reporter._descriptor, b"\xff" * 10)
        for step in range(40_000):  # each pipe has room for a megabyte
            log_to_driver("a line of some length " * 2)
            report(loss=1.0, step=step)
        return "done"

    assert ranks.run(1, main) == "done"
    told = "what rank 0 reports, logs or saves is lost from here on"
    assert capsys.readouterr().out.count(told) == 2


@pytest.mark.places("local")
def test_hundreds_of_megabytes_of_output_are_no_obstacle(ranks: Ranks) -> None:

    def main() -> None:
        block = b"x" * 99 + b"\n"
        for _ in range(300):
            sys.stdout.buffer.write(block * 10_000)
        print("the last words")
        raise ValueError("after 300 MB")

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        assert "after 300 MB" in str(fail(ranks, main))


def test_a_frozen_rank_ends_when_another_fails(ranks: Ranks, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def main() -> None:
        if os.environ["HOROVOD_RANK"] == "0":
            note.write_text(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGSTOP)
        while not note.exists() or not note.read_text().endswith("\n"):
            pass
        while psutil.Process(int(note.read_text())).status() != psutil.STATUS_STOPPED:
            pass
        raise ValueError("while the other was frozen")

    with pytest.raises(ValueError, match="while the other was frozen"):
        ranks.run(2, main)


def test_a_rank_that_is_deaf_in_native_code_ends_when_another_fails(ranks: Ranks) -> None:
    def main() -> None:
        if os.environ["HOROVOD_RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
            libc.pause()
        raise ValueError("while the other was deaf")

    with pytest.raises(ValueError, match="while the other was deaf"):
        ranks.run(2, main)


def test_failing_runs_leave_nothing_and_the_next_one_works(ranks: Ranks) -> None:

    def main(way: int) -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            if way == 0:
                raise ValueError("one way")
            if way == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            subprocess.Popen(["sleep", "1000"])
            sys.exit(5)
        threading.Event().wait()

    for number in range(15):
        with pytest.raises((ValueError, RankFailedError)):
            ranks.run(2, main, way=number % 3)
    assert ranks.run(2, int) == 0


@pytest.mark.places("local")
def test_an_exception_is_raised_though_rank_0_has_returned(ranks: Ranks, tmp_path: Path) -> None:
    written = tmp_path / "pid"

    def main() -> None:
        if os.environ["HOROVOD_RANK"] == "0":
            written.with_suffix(".part").write_text(str(os.getpid()))
            written.with_suffix(".part").rename(written)
            return
        while not written.exists():
            time.sleep(0.01)  # a file offers no event
        with contextlib.suppress(psutil.NoSuchProcess):
            assert wait_for_end([psutil.Process(int(written.read_text()))], 60) == []
        raise ValueError("after rank 0")

    with pytest.raises(ValueError, match="after rank 0"):
        ranks.run(2, main)


@pytest.mark.places("local")
def test_a_task_that_cannot_go_on_ends_the_run(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        threading.Event().wait()

    def link(address: Any, number: int, *args: Any) -> Link:
        if number == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return Link(address, number, *args)

    # The limit is reached in the driver's process, in the thread that starts the task.
    monkeypatch.setattr(task, "Link", link)
    with pytest.raises(LaunchError, match=r"task 1 of 2 .*Too many open files"):
        ranks.run(2, main)
