"""Parses the Python stacks of ranks and formats them for people.

The input is faulthandler's: blocks of "Thread 0x... (most recent call first):" and lines of
``File "train.py", line 41 in step``. The main thread's block is the last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod_runner.common.text import ranks_text

_CALL = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
# These calls start the worker; the user's calls are above them.
_OURS = re.compile(r"horovod_runner[/\\]worker[/\\]main\.py$|^<frozen runpy>$")
# The thread that measures the rank; no user has started it.
_PROFILER = re.compile(r'horovod_runner[/\\]worker[/\\]profiling[/\\]\w+\.py", line')
# The files and folders of this package, which may be anywhere on another host.
_ROOMS = "|".join(re.escape(each.stem) for each in Path(__file__).parents[1].iterdir())
_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages|python3\.\d+)[/\\]|(^|\")<(frozen |string>)"
    rf"|[/\\]horovod_runner[/\\]({_ROOMS})(\.py|[/\\])"
)
_COLLECTIVE = re.compile(
    r"[/\\](horovod[/\\]|torch[/\\]distributed[/\\]|tensorflow[/\\]python[/\\]eager[/\\]execute\.py)"
)
_MAX_GROUPS = 8
NO_ANSWER = "no answer: it is frozen, or waits in the kernel for a disk"


def is_library(call: str) -> bool:
    """Whether a call, or its file, is in a library and not in code of the user's."""
    return _LIBRARY.search(call) is not None


def split_threads(text: str) -> list[list[str]]:
    """Split a stack dump into the calls of each thread.

    Returns:
        A list of lines per thread, the most recent call first. The main thread's list is first; a
        thread with lines of this package alone has none.
    """
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if "most recent call first" in line:
            blocks.append([])
        elif blocks and (match := _CALL.match(line)) and not _OURS.search(match["file"]):
            blocks[-1].append(line.strip())
    return [calls for calls in reversed(blocks) if calls and not _is_profiler(calls)]


def without_profiler(lines: Sequence[str]) -> list[str]:
    """Leave out the stack of the thread that measures a rank from lines that the rank printed."""
    kept: list[str] = []
    block: list[str] = []  # of a thread, with its first line
    for line in lines:
        starts = "most recent call first" in line
        if block and (starts or not line.startswith("  File ")):
            is_left_out = _is_profiler(block)
            kept += [] if is_left_out else block
            block = []
            if is_left_out and not line:  # the empty line after it
                continue
        if starts or block:
            block.append(line)
        else:
            kept.append(line)
    return kept if _is_profiler(block) else kept + block


def _is_profiler(calls: Sequence[str]) -> bool:
    return any(map(_PROFILER.search, calls))


def place(text: str) -> str:
    """Where the main thread is, in a few words: the innermost line of the user's code."""
    calls = next(iter(split_threads(text)), None)
    if calls is None:
        return NO_ANSWER
    users = next((call for call in calls if not is_library(call)), calls[0])
    inner = "" if users == calls[0] else f", inside {calls[0].rpartition(' in ')[2]}"
    return f"{_short(users)}{inner}"


def in_collective(text: str) -> bool:
    """Whether any thread is inside a call of Horovod or torch.distributed.

    TensorFlow calls Horovod from native code, so any TensorFlow execution counts.
    """
    return any(_COLLECTIVE.search(call) for calls in split_threads(text) for call in calls)


def _short(call: str) -> str:
    match = _CALL.match(f"  {call}")
    assert match is not None  # noqa: S101 - made by split_threads()
    file = re.split(r"[/\\]", match["file"])[-1]
    return f"{file}:{match['line']} in {match['name']}"


def show(by_rank: Mapping[int, str]) -> str:
    """Format the stacks of all ranks; ranks with equal stacks share a block.

    Of more than 8 different stacks, the most common one is shown, and those of the fewest ranks.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(by_rank.items()):
        groups.setdefault(_block(split_threads(text)), []).append(rank)
    shown, rest = fold(groups)
    lines = [f"Stack of {ranks_text(ranks)}:\n{block}" for block, ranks in shown.items()]
    if rest:
        lines.append(f"The stacks of {ranks_text(rest)} are left out: they differ from these.")
    return "\n".join(lines)


def fold(groups: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], list[int]]:
    """Choose the groups of ranks to show, in their order; also returns the ranks of the others.

    The largest group is what most ranks do, and the smallest ones are those that stand out.
    """
    by_size = sorted(groups, key=lambda text: len(groups[text]))
    chosen = {*by_size[: _MAX_GROUPS - 1], *by_size[-1:]}
    shown = {text: ranks for text, ranks in groups.items() if text in chosen}
    rest = [rank for text, ranks in groups.items() if text not in chosen for rank in ranks]
    return shown, rest


def _block(calls_by_thread: Sequence[Sequence[str]]) -> str:
    if not calls_by_thread:
        return f"  | {NO_ANSWER}"
    parts = []
    for number, calls in enumerate(calls_by_thread):
        title = "main thread" if number == 0 else "another thread"
        parts.append(f"  | {title}, most recent call first:")
        parts += [f"  |   {call}" for call in calls]
    return "\n".join(parts)
