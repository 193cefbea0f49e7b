"""Prints to the driver's stdout and stderr: the terminal, the notebook cell, the job's log."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, TextIO

from horovod_runner.sinks import Sink, is_terminal, write
from horovod_runner.sinks.progress import Progress
from horovod_runner.topology import MANY, spans

if TYPE_CHECKING:
    from horovod_runner.messages import Report
    from horovod_runner.result import Run

Stream = Literal["stdout", "stderr"]
_GATHER_SECONDS = 0.3  # ranks do not print the same at quite the same time
_MOST_GATHERED = 1000  # lines


class TerminalSink(Sink):
    """Prints what comes back.

    Args:
        size: with more than one rank, each line of output names its rank; with many, lines that
            several of them print at the same time are printed once, with all their ranks.
        progress: whose bar is to stay below what is printed.
    """

    def __init__(self, size: int, progress: Progress | None = None) -> None:
        self._prefixed = size > 1
        self._gathers = size > MANY
        # By stream, line and how often the rank has printed that: its ranks.
        self._gathered: dict[tuple[Stream, str, int], list[int]] = {}
        self._printed: Counter[tuple[int, Stream, str]] = Counter()
        self._since = 0.0  # when the first of them came
        self._lock = threading.RLock()  # a user's sink gives notice from a thread of its own
        self._progress = progress

    def output(self, rank: int, stream: Stream, text: str) -> None:
        """A piece of what a rank printed, to the stream of the same name."""
        lines = text.removesuffix("\n").split("\n")
        if self._gathers:
            self._gather(rank, stream, lines)
            return
        if self._prefixed:
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        self._write(_stream(stream), text)

    def idle(self) -> None:
        """Print what was gathered for long enough."""
        if self._gathered and time.monotonic() - self._since > _GATHER_SECONDS:
            self._print_gathered()

    def end(self, run: Run) -> None:
        """Print what is left."""
        self._print_gathered()

    def log(self, rank: int, text: str) -> None:
        """What ``log_to_driver`` was called with, as it is."""
        self._print_gathered()
        self._write(sys.stdout, f"{text}\n")

    def reports(self, reports: Sequence[Report]) -> None:
        """For the progress bar alone."""

    def notice(self, text: str) -> None:
        """To stderr: a program's own output stays its own."""
        self._print_gathered()
        # On a terminal Spark's progress bar may stand on the line: wipe it.
        start = "\r\x1b[K" if is_terminal() else ""
        lines = "".join(f"HorovodRunner: {line}\n" for line in text.splitlines())
        self._write(sys.stderr, start + lines)

    def _gather(self, rank: int, stream: Stream, lines: Sequence[str]) -> None:
        with self._lock:
            if not self._gathered:
                self._since = time.monotonic()
            for line in lines:
                self._printed[rank, stream, line] += 1
                times = self._printed[rank, stream, line]
                self._gathered.setdefault((stream, line, times), []).append(rank)
            if len(self._gathered) > _MOST_GATHERED:
                self._print_gathered()

    def _print_gathered(self) -> None:
        with self._lock:
            while self._gathered:
                stream = next(iter(self._gathered))[0]
                keys = list(takewhile(lambda key: key[0] == stream, self._gathered))  # noqa: B023
                lines = [f"[{spans(self._gathered[key])}] {key[1]}\n" for key in keys]
                self._write(_stream(stream), "".join(lines))
                for key in keys:  # an interrupt while they were written has lost none
                    del self._gathered[key]
            self._printed.clear()

    def _write(self, stream: TextIO, text: str) -> None:
        with nullcontext() if self._progress is None else self._progress.away(text):
            write(stream, text)


def _stream(name: Stream) -> TextIO:
    return sys.stdout if name == "stdout" else sys.stderr
