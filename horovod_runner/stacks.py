"""Python stacks of many ranks, as people want to read them.

What comes in is faulthandler's: blocks of "Thread 0x... (most recent call first):" and lines of
``File "train.py", line 41 in step``, the main thread's block last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from horovod_runner.topology import ranks_text

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
# From here on down a stack is this package's, and Python's way to start it.
_OURS = re.compile(r"horovod_runner[/\\]worker\.py$|^<frozen runpy>$")
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|python3\.\d+)[/\\]|^<frozen ")
_COLLECTIVE = re.compile(
    r"[/\\](horovod[/\\]|torch[/\\]distributed[/\\]|tensorflow[/\\]python[/\\]eager[/\\]execute\.py)"
)
NO_ANSWER = "no answer: it is frozen, or waits in the kernel for a disk"


def threads(text: str) -> list[list[str]]:
    """Each thread's frames, most recent first, the main thread in front."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if "most recent call first" in line:
            found.append([])
        elif found and (match := _FRAME.match(line)) and not _OURS.search(match["file"]):
            found[-1].append(line.strip())
    return [frames for frames in reversed(found) if frames]


def place(text: str) -> str:
    """Where the main thread is, in a few words: the user's own line that it came by."""
    frames = next(iter(threads(text)), None)
    if frames is None:
        return NO_ANSWER
    own = next((frame for frame in frames if not _LIBRARY.search(frame)), frames[0])
    inner = "" if own == frames[0] else f", inside {_name(frames[0])}"
    return f"{_short(own)}{inner}"


def in_collective(text: str) -> bool:
    """Whether any thread is inside a call of Horovod or torch.distributed.

    TensorFlow calls Horovod from native code: all that is seen is that it executes something.
    """
    return any(_COLLECTIVE.search(frame) for frames in threads(text) for frame in frames)


def _short(frame: str) -> str:
    match = _FRAME.match(f"  {frame}")
    assert match is not None  # noqa: S101 - made by threads()
    file = re.split(r"[/\\]", match["file"])[-1]
    return f"{file}:{match['line']} in {match['name']}"


def _name(frame: str) -> str:
    return frame.rpartition(" in ")[2]


def show(by_rank: Mapping[int, str]) -> str:
    """All ranks' stacks, ranks with the same ones together."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(by_rank.items()):
        groups.setdefault(_block(threads(text)), []).append(rank)
    return "\n".join(f"Stack of {ranks_text(ranks)}:\n{block}" for block, ranks in groups.items())


def _block(found: Sequence[Sequence[str]]) -> str:
    if not found:
        return f"  | {NO_ANSWER}"
    parts = []
    for number, frames in enumerate(found):
        title = "main thread" if number == 0 else "another thread"
        parts.append(f"  | {title}, most recent call first:")
        parts += [f"  |   {frame}" for frame in frames]
    return "\n".join(parts)
