"""`horovod-runner top` beside a run of two ranks, in a pipe and in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_runner.results import registry
from tests.programs import ROOT, Program, run

pytest.importorskip("rich")

COMMAND = [sys.executable, "-m", "horovod_runner.tools.commands.cli"]
SCRIPT = """
import os, sys, threading
from horovod_runner import HorovodRunner, report
from horovod_runner.sinks import Sink

class Tell(Sink):
    def profile(self, profile):
        print("measured", profile.rank, flush=True)

def train():
    rank, step = os.environ["RANK"], 0
    print("rank", rank, "trains", flush=True)
    while not os.path.exists("enough"):
        report(loss=1 / (step + 1), step=step, total_steps=1_000_000)
        step += 1
        threading.Event().wait(0.01)

HorovodRunner(np=-2, sinks=[Tell()], progress=False).run(train)
"""


@pytest.fixture
def driver(
    own_records: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    """A run whose two ranks have been measured, and train until there is a file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "train.py").write_text(SCRIPT)
    with Program(
        [sys.executable, "train.py"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        measured: set[str] = set()
        while len(measured) < 2:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line
            measured |= {*re.findall(r"measured (\d)", line)}
        yield process
        (tmp_path / "enough").touch()
        process.communicate(timeout=100)


def only_run() -> str:
    """The id of the one run with an entry here; others may be under way on this machine."""
    (path,) = registry.folder().glob("*.json")
    return path.stem


def top(*arguments: str) -> str:
    done = run(*COMMAND, "top", *arguments, check=True)
    assert done.stderr == ""
    return done.stdout


class Terminal:
    """`top` in a terminal of 24 lines and 80 columns.

    Attributes:
        shown: all that it has written.
    """

    def __init__(self, *arguments: str) -> None:
        self._own, self._other = pty.openpty()
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self._other)
        self.shown = ""
        self.process = subprocess.Popen(
            [*COMMAND, "top", *arguments],
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            start_new_session=True,
            # Keys such as Ctrl-C become signals in the session whose terminal it is.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.shown):
            piece = os.read(self._own, 1 << 16)
            self.shown += piece.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def close(self) -> Any:
        """Wait for the command's end, and return what the terminal is like then."""
        self.process.wait(timeout=400)
        after = termios.tcgetattr(self._other)
        os.close(self._other)
        try:
            while piece := os.read(self._own, 1 << 16):
                self.shown += piece.decode(errors="replace")
        except OSError:  # raised at the end of a terminal
            pass
        os.close(self._own)
        return after


def assert_restored(terminal: Terminal, after: Any) -> None:
    assert after == terminal.before
    for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert on in terminal.shown
        assert terminal.shown.rindex(off) > terminal.shown.rindex(on)


@pytest.mark.usefixtures("nothing_left")
def test_top_shows_a_run_while_it_goes_on(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    run_id = only_run()
    lines = top(run_id).splitlines()  # once, for this is no terminal
    assert "\x1b" not in "".join(lines)
    assert lines[0].startswith(f"{run_id}  train  running  2 ranks on local")
    assert re.match(r"step [\d,]+ of 1,000,000 .* steps/s", lines[1])
    assert any("█ compute" in line for line in lines)
    assert {"[0] rank 0 trains", "[1] rank 1 trains"} <= {*lines}
    assert top("--once").startswith(run_id)

    (found,) = json.loads(top("--json", run_id[:6]))
    assert (found["run_id"], found["problem"]) == (run_id, "")
    live = found["live"]
    assert [rank["rank"] for rank in live["ranks"]] == [0, 1]
    assert all(rank["rate"] > 0 for rank in live["ranks"])
    assert sum(live["shares"].values()) == pytest.approx(1)
    assert live["metrics"] == {"loss": pytest.approx(1 / (live["step"] + 1))}

    by_key = {b"q": 0, b"\x1a\x03": 0}  # Ctrl-Z, which does nothing, and Ctrl-C
    for keys, status in by_key.items():
        terminal = Terminal()
        terminal.read_until("steps/s")
        terminal.press(keys)
        assert_restored(terminal, terminal.close())
        assert terminal.process.returncode == status
        assert "Traceback" not in terminal.shown
    terminal = Terminal()
    terminal.read_until("steps/s")
    terminal.process.terminate()
    assert_restored(terminal, terminal.close())
    assert terminal.process.returncode == 128 + signal.SIGTERM

    terminal = Terminal(run_id)
    terminal.read_until("rank 1 trains")
    (tmp_path / "enough").touch()
    assert_restored(terminal, terminal.close())
    assert terminal.shown.rstrip().endswith(f"run {run_id} has finished")
    driver.wait()
    assert run_id not in top("--once")
    assert not list(registry.folder().iterdir())
