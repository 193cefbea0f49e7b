"""Looks at the line that the main thread executes, up to fifty times a second.

Each look walks the frames of one thread. That takes two microseconds in a loop, but 30 to 70 in a
training, which fills the processor's caches with its own data. To wake the thread takes as long
again. So :class:`Pace` limits the looks by their cost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, BinaryIO, Final, TypeAlias

LOOK_SECONDS: Final = 0.02  # between two looks, at least
_FIRST_SECONDS: Final = 0.04  # as long as the cost is not known
_RARE_SECONDS: Final = 0.1  # at most
_CPU: Final = 0.003  # of a core, for the thread that looks
_DEEPEST: Final = 64  # frames
_MOST: Final = 2000  # different stacks
_MOST_LINES: Final = 50_000  # code may be made anew again and again
_BACKWARD: Final = "_engine_run_backward"  # torch's, which waits for DDP's collectives at its end
_DISTRIBUTED: Final = "torch/distributed/"

#: A stack: (file, function, line), the outermost call first.
Stack = tuple[tuple[str, str, int], ...]
# For each call, the innermost first, the number of its line in Sampler._lines.
_Coded: TypeAlias = tuple[int, ...]


class Pace:
    """How long to wait between two looks, for a thread that takes 0.3% of a core with all it does.

    Make it in that thread.

    Attributes:
        seconds: between two looks: from 0.02 to 0.1.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self.seconds = _FIRST_SECONDS
        self._clock = clock
        self._computed = computed
        self._before = clock(), computed()

    def adjust(self) -> None:
        """Look less or more often, by the CPU time since the last call; once a second or so."""
        now = self._clock(), self._computed()
        seconds, cpu = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        if seconds > 0:
            wanted = self.seconds * cpu / seconds / _CPU
            self.seconds = min(max(wanted, LOOK_SECONDS), _RARE_SECONDS)


class Sampler:
    """Adds up for how long the main thread has had which stack.

    A look stands for the time since the look before, so that the shares are right at any pace.

    Args:
        outermost: the calls of this function, and those around it, are left out.

    Attributes:
        total: microseconds that the looks stand for.
    """

    def __init__(
        self, outermost: CodeType | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.total = 0
        self.late_looks = 0
        self._blocked = self._unblocked = 0
        self._outermost = outermost
        self._looked = clock()
        self._state: BinaryIO | None = None
        self._main = threading.main_thread().ident
        self._counts: Counter[_Coded] = Counter()
        self._others: Counter[_Coded] = Counter()
        # The number of the line, by the address of the code object plus the instruction's offset:
        # a code object contains its instructions. A tuple of the two touches more memory.
        self._numbers: dict[int, int] = {}
        # The line of each number. Code objects are kept, so that no two get the same address.
        self._lines: list[tuple[CodeType, int]] = []
        self._blocks: list[bool] = []  # of each number, whether it may wait for collectives

    def look(self) -> None:
        """Take the stack at this moment for that of all the time since the last look."""
        stack = self._walk(sys._current_frames().get(self._main or 0))
        now = self._clock()
        elapsed = round((now - self._looked) * 1e6)
        self._looked = now
        self.total += elapsed
        if stack and self._blocks[stack[0]] and self._sleeps():
            self._blocked += elapsed
        else:
            self._unblocked += elapsed
        add(self._counts, stack, elapsed)

    def take_blocked(self) -> float:
        """In which share of the time the main thread waited in a call of torch's collectives.

        Of the time since the last call of this method.
        """
        share = self._blocked / max(1, self._blocked + self._unblocked)
        self._blocked = self._unblocked = 0
        return share

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
                add(self._others, self._walk(frame), 1)

    def _walk(self, frame: FrameType | None) -> _Coded:
        stack: list[int] = []
        numbers, outermost = self._numbers, self._outermost
        while frame is not None and len(stack) < _DEEPEST:
            code = frame.f_code
            if code is outermost:
                break
            place = id(code) + frame.f_lasti
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

    def forget(self) -> None:
        """Begin again; for the thread that looks."""
        self.total = self.late_looks = 0
        self._counts, self._others = Counter(), Counter()

    def stacks(self) -> dict[Stack, int]:
        """For how many microseconds the main thread had each stack."""
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


def add(counts: Counter[Any], stack: tuple[Any, ...], amount: int) -> None:
    """Count a stack, unless there are very many others."""
    if stack in counts or len(counts) < _MOST:
        counts[stack] += amount
