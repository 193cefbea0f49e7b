"""Notices in a terminal and in a file."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from horovod_runner.common.text import broken
from horovod_runner.sinks.streams import stdout_to_stderr
from horovod_runner.sinks.terminal import TerminalSink
from tests.stand_ins import KERNEL

LONG = "no progress for 60 s: ranks 0-62 wait in allreduce.a for rank 63; the run ends at 1800 s"


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_notice_is_broken_between_words_in_a_terminal(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    TerminalSink(64, width=lambda: width).notice(f"{LONG}\na short line")
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first.startswith("HorovodRunner: no progress for")
    assert last == "HorovodRunner: a short line"
    assert " ".join([first, *(line.strip() for line in others)]) == f"HorovodRunner: {LONG}"
    assert all(len(line) <= width for line in (first, *others))
    assert all(line.startswith("  ") for line in others)


def test_a_path_stays_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/long/" + "x" * 60 + "/a-b-c"
    TerminalSink(2, width=lambda: 50).notice(f"the folder {path} is full")
    assert path in capsys.readouterr().err


def test_a_notice_in_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalSink(2).notice(LONG)
    assert capsys.readouterr().err == f"HorovodRunner: {LONG}\n"


def test_a_line_of_scattered_ranks_says_how_many_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = TerminalSink(64)
    for rank in range(0, 64, 2):
        sink.output(rank, "stdout", "even\n")
    for rank in (1, 2, 7):
        sink.output(rank, "stdout", "few\n")
    sink.log(0, "done")
    assert capsys.readouterr().out == "[32 ranks] even\n[1-2, 7] few\ndone\n"


def test_a_notebook_shows_notices_as_ordinary_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", KERNEL)
    TerminalSink(2).notice(LONG)
    assert capsys.readouterr() == (f"HorovodRunner: {LONG}\n", "")


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"\u2713 \xe9"), ("latin-1", "\\u2713 é")]
)
def test_a_line_that_stdout_cannot_encode_is_escaped_and_not_lost(
    encoding: str, shown: str
) -> None:
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding=encoding)) as stream:
        TerminalSink(1).output(0, "stdout", "before\n\u2713 é\nafter\n")
    assert not stream.closed
    assert written.getvalue().decode(encoding) == f"before\n{shown}\nafter\n"


def test_a_process_without_stdout_prints_nothing() -> None:
    with redirect_stdout(None), redirect_stderr(None):
        sink = TerminalSink(2)
        sink.output(0, "stdout", "line\n")
        sink.notice("notice")


def test_what_a_child_process_prints_goes_to_stderr_for_a_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stdout_to_stderr():
        subprocess.run(["echo", "from Java"], check=True)
    subprocess.run(["echo", "a result"], check=True)
    assert capfd.readouterr() == ("a result\n", "from Java\n")


def test_a_narrow_terminal_leaves_room_beside_the_indent() -> None:
    lines = broken("word " * 30, 40, 36).splitlines()
    assert max(map(len, lines)) <= 40
    assert all(line.startswith(" " * 20 + "word word") for line in lines[1:])
