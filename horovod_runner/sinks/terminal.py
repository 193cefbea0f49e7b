"""Prints to the driver's stdout and stderr: the terminal, the notebook cell, the job's log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, TextIO

from horovod_runner.sinks import Sink, is_terminal, write
from horovod_runner.sinks.progress import Progress

if TYPE_CHECKING:
    from horovod_runner.messages import Report


class TerminalSink(Sink):
    """Prints what comes back.

    Args:
        size: with more than one rank, each line of output names its rank.
        progress: whose bar is to stay below what is printed.
    """

    def __init__(self, size: int, progress: Progress | None = None) -> None:
        self._prefixed = size > 1
        self._progress = progress

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """A piece of what a rank printed, to the stream of the same name."""
        if self._prefixed:
            lines = text.removesuffix("\n").split("\n")
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        self._write(sys.stdout if stream == "stdout" else sys.stderr, text)

    def log(self, rank: int, text: str) -> None:
        """What ``log_to_driver`` was called with, as it is."""
        self._write(sys.stdout, f"{text}\n")

    def reports(self, reports: Sequence[Report]) -> None:
        """For the progress bar alone."""

    def notice(self, text: str) -> None:
        """To stderr: a program's own output stays its own."""
        # On a terminal Spark's progress bar may stand on the line: wipe it.
        start = "\r\x1b[K" if is_terminal() else ""
        lines = "".join(f"HorovodRunner: {line}\n" for line in text.splitlines())
        self._write(sys.stderr, start + lines)

    def _write(self, stream: TextIO, text: str) -> None:
        with nullcontext() if self._progress is None else self._progress.away(text):
            write(stream, text)
