"""Prints to the driver's stdout and stderr: the terminal, the notebook cell, the job's log."""

from __future__ import annotations

import sys
from typing import Literal, TextIO


class TerminalSink:
    """Prints what comes back.

    Args:
        size: with more than one rank, each line of output names its rank.
    """

    def __init__(self, size: int) -> None:
        self._prefixed = size > 1

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """A piece of what a rank printed, to the stream of the same name."""
        if self._prefixed:
            lines = text.removesuffix("\n").split("\n")
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        _write(sys.stdout if stream == "stdout" else sys.stderr, text)

    def log(self, rank: int, text: str) -> None:
        """What ``log_to_driver`` was called with, as it is."""
        _write(sys.stdout, f"{text}\n")

    def notice(self, text: str) -> None:
        """To stderr: a program's own output stays its own."""
        # On a terminal Spark's progress bar may stand on the line: wipe it.
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        lines = "".join(f"HorovodRunner: {line}\n" for line in text.splitlines())
        _write(sys.stderr, start + lines)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return  # the terminal has gone, or the stream is closed: no reason to end a training
