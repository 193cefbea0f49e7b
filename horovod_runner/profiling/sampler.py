"""Looks fifty times a second at the line that the main thread executes.

Each look walks the frames of one thread, and takes some ten microseconds.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import BinaryIO, Final, TypeAlias

LOOK_SECONDS: Final = 0.02
_DEEPEST: Final = 64  # frames
_MOST: Final = 2000  # different stacks
_MOST_LINES: Final = 50_000  # code may be made anew again and again
_BACKWARD: Final = "_engine_run_backward"  # torch's, which waits for DDP's collectives at its end
_DISTRIBUTED: Final = "torch/distributed/"

#: A stack: (file, function, line), the outermost call first.
Stack = tuple[tuple[str, str, int], ...]
# For each call, the innermost first, the number of its line in Sampler._lines.
_Coded: TypeAlias = tuple[int, ...]


class Sampler:
    """Counts the stacks of the main thread.

    Attributes:
        looks: how many times it has looked.
        late_looks: how many times it has looked at the other threads.
        blocked: how often the main thread waited in a call of torch that waits for collectives.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.late_looks = 0
        self.blocked = 0
        self._state: BinaryIO | None = None
        self._main = threading.main_thread().ident
        self._counts: Counter[_Coded] = Counter()
        self._others: Counter[_Coded] = Counter()
        # By the identity of a code object and an instruction of it, the number of the line. To hash
        # a code object itself, Python goes through all of its instructions.
        self._numbers: dict[tuple[int, int], int] = {}
        # The line of each number. Code objects are kept, so that no two get the same identity.
        self._lines: list[tuple[CodeType, int]] = []
        self._blocks: list[bool] = []  # of each number, whether it may wait for collectives

    def look(self) -> None:
        """Count the stack at this moment."""
        stack = self._walk(sys._current_frames().get(self._main or 0))
        self.looks += 1
        if stack and self._blocks[stack[0]]:
            self.blocked += self._sleeps()
        _count(self._counts, stack)

    def _sleeps(self) -> bool:
        """Whether the main thread waits for something, and does not compute; True if unknown."""
        try:
            if self._state is None:
                self._state = open(f"/proc/self/task/{os.getpid()}/stat", "rb")  # noqa: SIM115
            text = os.pread(self._state.fileno(), 128, 0)
        except OSError:
            return True
        return text.rpartition(b")")[2].lstrip()[:1] != b"R"

    def look_at_others(self) -> None:
        """Count the stacks of all other threads at this moment; those that wait are among them."""
        self.late_looks += 1
        mine = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            if thread not in (mine, self._main):
                _count(self._others, self._walk(frame))

    def _walk(self, frame: FrameType | None) -> _Coded:
        stack: list[int] = []
        numbers = self._numbers
        while frame is not None and len(stack) < _DEEPEST:
            place = (id(frame.f_code), frame.f_lasti)
            number = numbers.get(place)
            if number is None and len(self._lines) < _MOST_LINES:
                number = numbers[place] = self._new_line(frame)
            if number is not None:
                stack.append(number)
            frame = frame.f_back
        return tuple(stack)

    def _new_line(self, frame: FrameType) -> int:
        code = frame.f_code
        self._lines.append((code, frame.f_lineno))
        self._blocks.append(code.co_name == _BACKWARD or _DISTRIBUTED in code.co_filename)
        return len(self._lines) - 1

    def stacks(self) -> dict[Stack, int]:
        """How often each stack of the main thread was seen."""
        return self._decoded(self._counts)

    def stacks_of_others(self) -> dict[Stack, int]:
        """How often each stack of other threads was seen."""
        return self._decoded(self._others)

    def _decoded(self, counts: Counter[_Coded]) -> dict[Stack, int]:
        stacks: Counter[Stack] = Counter()
        for coded, count in dict(counts).items():  # in one step: the looking thread may add to it
            calls = [self._lines[number] for number in reversed(coded)]
            stacks[tuple((code.co_filename, code.co_qualname, line) for code, line in calls)] += (
                count
            )
        return stacks


def _count(counts: Counter[_Coded], stack: _Coded) -> None:
    if stack in counts or len(counts) < _MOST:
        counts[stack] += 1
