"""Programs that tests start beside themselves."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]


class Program(subprocess.Popen[str]):
    """A child process that does not outlive a test that fails or takes too long.

    At the end of its block a Popen waits for the child, whatever ended the block: one that never
    ends keeps the test for ever. This one is killed first where the block raised.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, traceback)


def run(
    *command: object,
    variables: Mapping[str, str] | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it prints is captured as text.

    Args:
        *command: the words of its command line.
        variables: of its environment, beside those of this process.
        check: whether another exit code than 0 is an error.
        **options: of subprocess.run.
    """
    given = {"env": {**os.environ, **(variables or {})}, "timeout": 500, **options}
    return subprocess.run(
        list(map(str, command)), check=check, capture_output=True, text=True, **given
    )


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process, as `run` does. The code may be indented."""
    return run(sys.executable, "-c", textwrap.dedent(code), *arguments, **options)


def script(path: Path, body: str) -> Path:
    """Write a program for the shell, which tests find instead of another one; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def await_in_log(log: Path, pattern: str, process: subprocess.Popen[Any], seconds: float) -> str:
    """Wait until a process has written a text to its log; returns the pattern's group."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        match = re.search(pattern, log.read_text(errors="replace"))
        if match:
            return match.group(1)
        time.sleep(0.1)  # a log file offers no event
    raise RuntimeError(f"no {pattern!r} in {log}:\n{log.read_text(errors='replace')[-2000:]}")


def await_condition(condition: Callable[[], object], seconds: float = 100) -> None:
    """Wait for what other threads and processes do, where nothing tells of it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses at the moment."""
    with ExitStack() as stack:
        # All are bound at the same time, so that they differ.
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]
