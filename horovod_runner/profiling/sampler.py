"""Looks fifty times a second at the line that the main thread executes.

Each look walks the frames of one thread and takes some 20 microseconds.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Final, TypeAlias

LOOK_SECONDS: Final = 0.02
_DEEPEST: Final = 64  # frames
_MOST: Final = 2000  # different stacks
_BACKWARD: Final = "_engine_run_backward"  # torch's, which waits for DDP's collectives at its end
_DISTRIBUTED: Final = "torch/distributed/"

#: A stack: (file, function, line), the outermost call first.
Stack = tuple[tuple[str, str, int], ...]
# The innermost call first.
_Coded: TypeAlias = tuple[tuple[CodeType, int], ...]


class Sampler:
    """Counts the stacks of the main thread.

    Attributes:
        looks: how many times it has looked.
        late_looks: how many times it has looked at the other threads.
        blocked: how often the main thread was in a call of torch that waits for collectives.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.late_looks = 0
        self.blocked = 0
        self._blocks: dict[CodeType, bool] = {}
        self._main = threading.main_thread().ident
        # Code objects are kept, so that no two get the same identity.
        self._counts: Counter[_Coded] = Counter()
        self._others: Counter[_Coded] = Counter()

    def look(self) -> None:
        """Count the stack at this moment."""
        frame = sys._current_frames().get(self._main or 0)
        self.looks += 1
        if frame is not None:
            self.blocked += self._may_block(frame.f_code)
        stack = _walk(frame)
        if stack in self._counts or len(self._counts) < _MOST:
            self._counts[stack] += 1

    def look_at_others(self) -> None:
        """Count the stacks of all other threads at this moment; those that wait are among them."""
        self.late_looks += 1
        mine = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            if thread not in (mine, self._main) and len(self._others) < _MOST:
                self._others[_walk(frame)] += 1

    def _may_block(self, code: CodeType) -> bool:
        blocks = self._blocks.get(code)
        if blocks is None:
            blocks = code.co_name == _BACKWARD or _DISTRIBUTED in code.co_filename
            self._blocks[code] = blocks
        return blocks

    def stacks(self) -> dict[Stack, int]:
        """How often each stack of the main thread was seen."""
        return _decoded(self._counts)

    def stacks_of_others(self) -> dict[Stack, int]:
        """How often each stack of other threads was seen."""
        return _decoded(self._others)


def _decoded(counts: Counter[_Coded]) -> dict[Stack, int]:
    copied = dict(counts)  # in one step: the looking thread may add to it
    return {
        tuple((code.co_filename, code.co_qualname, line) for code, line in reversed(stack)): n
        for stack, n in copied.items()
    }


def _walk(frame: FrameType | None) -> _Coded:
    """The code and line of a frame and its callers, the innermost first."""
    stack: list[tuple[CodeType, int]] = []
    while frame is not None and len(stack) < _DEEPEST:
        stack.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(stack)
