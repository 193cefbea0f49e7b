"""Programs that tests start beside themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
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


def await_condition(condition: Callable[[], object], seconds: float = 100) -> None:
    """Wait for what other threads and processes do, where nothing tells of it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
