"""`horovod-runner top`: what it draws, and how it asks drivers. Drivers here are this process."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

pytest.importorskip("rich")

from rich.console import Console, RenderableType

from horovod_runner.results import registry, saved_run
from horovod_runner.results.live import Live, live
from horovod_runner.results.registration import Registration
from horovod_runner.results.registry import Entry
from horovod_runner.results.run_log import RunLog
from horovod_runner.tools.commands import cli
from horovod_runner.tools.commands.top import Seen, Watch
from horovod_runner.tools.commands.top_view import Detail, Overview
from horovod_runner.wire.events import Report
from tests.made_up_runs import keep, run_under_way

pytestmark = pytest.mark.usefixtures("own_records")


def drawn(picture: RenderableType, width: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    Console(file=file, width=width, highlight=False).print(picture)
    file.seek(0)
    lines = [line.rstrip("\n") for line in file]
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def seen(now: Live | None, problem: str = "") -> Seen:
    return Seen("3f9a1c7e", problem, now, None)


@pytest.mark.parametrize("width", [80, 200])
def test_a_run_is_drawn_with_its_ranks_and_last_lines(width: int) -> None:
    lines = drawn(Detail([seen(live(run_under_way(4, slow=3)))]), width)
    assert lines[0] == "3f9a1c7e  train  running  4 ranks on spark://master:7077  30 s"
    assert lines[1].startswith("epoch 2, step 341 of 1,200  ━")
    assert lines[1].endswith("28%  10 steps/s  1 min 26 s left")
    bar = lines[2]
    assert len(bar) == min(width, 100)
    assert [bar.count(glyph) for glyph in "█▓▒░▚"] == pytest.approx(
        [len(bar) * share for share in (0.44, 0.2, 0.3, 0.05, 0.01)], abs=1
    )
    legend = " ".join(lines[3:5])
    parts = (
        "█ compute 44%",
        "▓ wait for data 20%",
        "▒ wait for the slowest rank 30%",
        "░ reduce 5%",
    )
    assert all(part in legend for part in parts)
    assert "loss 0.25   memory 8.0 GB" in lines
    assert any(line.startswith("Rank 3 is last in 100%") for line in lines)
    (row,) = (line.split() for line in lines if line.lstrip().startswith("3  host-0"))
    assert row[-3:] == ["2.0", "GB", "13.2/16"]
    assert ("4003" in row) == (width == 200)
    assert lines[-1] == "[1] line 29"
    assert not any("…" in line for line in lines)


def test_the_last_lines_and_the_slowest_ranks_are_drawn_on_a_small_terminal() -> None:
    lines = drawn(Detail([seen(live(run_under_way(1000, seconds=3, slow=777)))], 24), 80)
    assert len(lines) <= 24
    assert any(line.lstrip().startswith("777  host-97") for line in lines)
    assert any(line.lstrip().startswith("980  others") for line in lines)
    assert lines[-1].endswith("line 29")


def test_a_rank_without_a_summary_for_long_is_marked_also_where_there_is_no_unicode() -> None:
    now = live(run_under_way(2))
    now.ranks[1].silent = 64.0
    lines = drawn(Detail([seen(now)]), 80, "ascii")
    assert [("no step 1 min 4 s" in line) for line in lines if "host-0" in line] == [False, True]
    assert all(line.isascii() for line in lines)
    assert any("####==" in line for line in lines)


def test_all_runs_are_drawn_in_blocks_with_those_that_do_not_answer() -> None:
    entry = Entry("77aa", "other.py", -2, "local", "box", 12, "", 0.0)
    runs = [seen(live(run_under_way(2))), Seen("77aa", "its driver is gone", None, entry)]
    lines = drawn(Overview(runs), 80)
    assert lines[0].startswith("3f9a1c7e  train  running")
    end = lines.index("[1] line 29")
    assert lines[end:] == ["[1] line 29", "", "77aa  other.py  np=-2  local", "its driver is gone"]
    few = drawn(Overview([*runs, *runs, *runs], 16), 80)
    assert len(few) <= 16
    assert few[-1].startswith("and 4 more:")
    assert drawn(Overview([]), 80) == ["no runs"]


def watching(run: str | None = None, **options: Any) -> Watch:
    """A watch over the entries alone, for which no driver answers late."""
    find = partial(registry.find, options.pop("listed", dict))
    return Watch(run, find=find, **{"quiet_seconds": 0.0, **options})


@contextmanager
def listed(**changed: object) -> Iterator[Path]:
    """A run whose driver is this process, and reads no questions; yields the folder of entries."""
    host, me = socket.gethostname(), os.getpid()
    entry = Entry("1a2b", "train", 2, "local", host, me, registry.born(me), time.time())
    folder = registry.folder()
    folder.mkdir(parents=True, exist_ok=True)
    changed_entry = msgspec.structs.replace(entry, **changed)
    (folder / "1a2b.json").write_bytes(msgspec.json.encode(changed_entry))
    os.mkfifo(folder / "1a2b.stop")
    fifo = os.open(folder / "1a2b.stop", os.O_RDWR | os.O_NONBLOCK)
    try:
        yield folder
    finally:
        os.close(fifo)


def test_a_driver_writes_its_log_when_it_is_asked() -> None:
    run, cancelled = run_under_way(2), threading.Event()
    log = RunLog(run, saved_run.new_path(run.run_id))
    with Registration(run, cancelled.set, log.flush):
        assert saved_run.kept() == []  # nobody has asked
        watch = watching(run.run_id[:4])
        (found,) = watch.once()
        assert (found.run_id, found.problem) == (run.run_id, "")
        assert found.live is not None
        assert found.live.step == 341
        (path,) = saved_run.kept()
        assert path.stat().st_mode & 0o777 == 0o600
        log.add([Report(0, {"loss": 0.2}, step=342)])
        (again,) = watch.once()
        assert again.live is not None
        assert (again.live.step, again.live.metrics) == (342, {"loss": 0.2})
        assert not cancelled.is_set()
    assert list(registry.folder().iterdir()) == []
    assert watching().once() == []


def test_a_driver_that_does_not_answer_is_shown_as_such() -> None:
    run = run_under_way(2)
    with listed() as folder:
        (found,) = watching(once_seconds=0.0).once()
        assert found.live is None
        assert f"its driver (process {os.getpid()}) has not answered for 0 s" in found.problem
        watch = watching(once_seconds=0.0)
        watch.ask()
        run.run_id = "1a2b"
        keep(run)
        (found,) = watch.once()
        assert found.live is not None
        watch.ask()
        (found,) = watch.once()
        assert found.live is not None
        assert "has not answered" in found.problem
        assert folder.exists()
        assert "as of 30 s: its driver" in "\n".join(drawn(Overview([found]), 80))


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_driver_answers_while_the_clock_is_set(hours: int) -> None:
    run = run_under_way(2)
    run.run_id = "1a2b"
    path = keep(run)
    with listed():
        watch = watching()
        watch.ask()
        assert not watch.read()
        moved = path.stat().st_mtime + 3600 * hours
        os.utime(path, (moved, moved))
        assert watch.read()
        assert watch.seen[0].problem == ""


def test_a_driver_that_does_not_answer_is_not_asked_every_second() -> None:
    with listed() as folder:
        watch = watching()
        for _ in range(5):
            watch.ask()
            watch.read()
        fifo = os.open(folder / "1a2b.stop", os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert os.read(fifo, 100) == b"w"
        finally:
            os.close(fifo)


def test_the_silence_of_a_driver_is_counted_from_the_first_question() -> None:
    now = 1000.0
    with listed():
        watch = watching(clock=lambda: now)
        problems = []
        for _ in range(25):  # seconds, with a question at the first, 11th and 21st
            watch.ask()
            watch.read()
            (found,) = watch.seen
            problems.append(found.problem)
            now += 1
    assert [re.findall(r"not answered for (\d+) s", problem) for problem in problems] == [
        [f"{seconds}"] for seconds in range(25)
    ]


def test_a_driver_of_another_version_is_shown_as_such() -> None:
    with listed():
        watch = watching()
        watch.ask()
        path = saved_run.path_of("1a2b")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"horovod_runner run 3\n")
        (found,) = watch.once()
        assert "is not the record of a run, or one of another version" in found.problem


def test_a_driver_that_is_stopped_is_shown_as_such() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            with listed(pid=process.pid, born=registry.born(process.pid)):
                (found,) = watching(once_seconds=0.0).once()
            assert f"(process {process.pid}) is stopped, by SIGSTOP or Ctrl-Z" in found.problem
        finally:
            process.kill()


def test_what_a_killed_driver_left_and_a_driver_elsewhere_are_shown() -> None:
    with listed(host="other-host"):
        (found,) = watching().once()
    assert found.problem == "its driver is on other-host: run horovod-runner top there"
    assert found.live is None
    registry.forget("1a2b")
    me = psutil.Process()
    left_here = {"1a2b": [me], "3c4d": [me, me]}
    with listed(born="another"):
        left, gone = watching(listed=lambda: left_here).once()  # one without an entry has no age
    assert gone.problem == (
        f"its driver (process {os.getpid()}) is gone, and 1 process of it is left here: "
        "horovod-runner stop 1a2b ends it"
    )
    assert left.problem == (
        "its driver is gone or on another host, and 2 processes of it are left here: "
        "horovod-runner stop 3c4d ends them"
    )


def test_the_end_of_the_one_run_is_told() -> None:
    run = run_under_way(2)
    with listed() as folder:
        watch = watching("1a")
        watch.ask()
        assert watch.ended == ""
        registry.forget("1a2b")
        while not watch.ended:
            watch.ask()
    assert not list(folder.iterdir())
    assert watch.ended == "run 1a2b has ended"
    run.run_id, run.status = "1a2b", "failed"
    run.attempts[-1].error = "ValueError: no good"
    keep(run)
    assert watch.ended == "run 1a2b has failed: ValueError: no good"


def test_without_rich_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "horovod_runner.tools.commands.top_view")
    monkeypatch.delattr("horovod_runner.tools.commands.top_view")
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["top"]) == 1
    assert "pip install 'horovod_runner[top]'" in capsys.readouterr().err
    # Other tests have runs at the same time, and the command line names no list of processes.
    monkeypatch.setattr(registry, "_processes", dict)
    assert cli.main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    with listed():
        assert cli.main(["top", "9", "--json"]) == 1
        assert capsys.readouterr().err == "horovod-runner: no run 9 here; there are: 1a2b\n"
