"""Prints the ranks' output and the runner's notices to the driver's stdout and stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, TextIO

from horovod_runner.common.text import MAX_LINES, broken, spans, without_password
from horovod_runner.sinks.progress import Progress
from horovod_runner.sinks.sink import Sink
from horovod_runner.sinks.streams import columns, for_notices, is_terminal, write

if TYPE_CHECKING:
    from horovod_runner.results.run import Run
    from horovod_runner.wire.events import Report

Stream = Literal["stdout", "stderr"]
_GATHER_SECONDS = 0.3  # ranks print the same line at slightly different times
_MAX_GATHERED = 1000  # lines
_MAX_SPANS = 4


@dataclass(eq=False)
class TerminalSink(Sink):
    """Prints what the ranks print, and notices; the progress bar stays below the text.

    With several ranks each line names its rank. With more than 16, a line that several print at
    about the same time is printed once, with their numbers, or with how many they are.
    """

    size: int
    progress: Progress | None = None
    width: Callable[[], int] = columns
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Ranks by (stream, line, how many times the rank has printed that line).
        self._gathered: dict[tuple[Stream, str, int], list[int]] = {}
        self._printed: Counter[tuple[int, Stream, str]] = Counter()
        self._since = 0.0  # when the first gathered line arrived
        self._lock = threading.RLock()  # a user's sink sends notices from another thread

    def output(self, rank: int, stream: Stream, text: str) -> None:
        """Print a piece of a rank's output to the stream of the same name."""
        lines = text.removesuffix("\n").split("\n")
        if self.size > MAX_LINES:
            self._gather(rank, stream, lines)
            return
        if self.size > 1:
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        self._write(_stream(stream), text)

    def idle(self) -> None:
        """Print gathered lines once they are old enough."""
        if self._gathered and self.clock() - self._since > _GATHER_SECONDS:
            self._print_gathered()

    def end(self, run: Run) -> None:
        """Print the remaining lines."""
        self._print_gathered()

    def log(self, rank: int, text: str) -> None:
        """Print the text of a ``log_to_driver`` call unchanged."""
        self._print_gathered()
        self._write(sys.stdout, f"{text}\n")

    def reports(self, reports: Sequence[Report]) -> None:
        """Print nothing: reports are for the progress bar. One call for many of them."""

    def notice(self, text: str) -> None:
        """Print a message of the runner, in a terminal broken between words."""
        self._print_gathered()
        # Spark's progress bar may be on the current line of a terminal: erase it.
        start = "\r\x1b[K" if is_terminal() else ""
        width = self.width()
        lines = "".join(
            f"{broken(f'HorovodRunner: {line}', width)}\n"
            for line in without_password(text).splitlines()
        )
        self._write(for_notices(), start + lines)

    def _gather(self, rank: int, stream: Stream, lines: Sequence[str]) -> None:
        with self._lock:
            if not self._gathered:
                self._since = self.clock()
            for line in lines:
                self._printed[rank, stream, line] += 1
                times = self._printed[rank, stream, line]
                self._gathered.setdefault((stream, line, times), []).append(rank)
            if len(self._gathered) > _MAX_GATHERED:
                self._print_gathered()

    def _print_gathered(self) -> None:
        with self._lock:
            while self._gathered:
                stream = next(iter(self._gathered))[0]
                keys = list(takewhile(lambda key: key[0] == stream, self._gathered))  # noqa: B023
                lines = [f"[{_who(self._gathered[key])}] {key[1]}\n" for key in keys]
                self._write(_stream(stream), "".join(lines))
                for key in keys:  # after the write, so that an interrupt loses no line
                    del self._gathered[key]
            self._printed.clear()

    def _write(self, stream: TextIO, text: str) -> None:
        with nullcontext() if self.progress is None else self.progress.hidden(text):
            write(stream, text)


def _who(ranks: Sequence[int]) -> str:
    """The ranks that printed a line: their numbers, or how many where the numbers would be long."""
    text = spans(ranks)
    return text if text.count(",") < _MAX_SPANS else f"{len(ranks)} ranks"


def _stream(name: Stream) -> TextIO:
    return sys.stdout if name == "stdout" else sys.stderr
