"""Which of the user's own lines ranks were seen at, in words for a diagnosis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from horovod_runner.common.stacks import is_library
from horovod_runner.results.slowness.profile import RunProfile
from horovod_runner.wire.measurements import Thread

_LOADER: Final = re.compile(r"torch[/\\]utils[/\\]data[/\\]|horovod_runner[/\\]data[/\\]")
# Functions that release the interpreter lock while they wait.
_WAITS: Final = re.compile(
    r"[ .](wait|acquire|join|get|put|select|poll|accept|_?recv|recv_into|recv_bytes|read|readline"
    r"|readinto|sleep|_wait_for_tstate_lock)$"
)
_NOT_MUCH: Final = 0.05  # of all looks


def user_lines(profile: RunProfile, rank: int, thread: Thread = "main") -> dict[str, float]:
    """By line of the user's own code, the share of looks at which a rank was in it, most first.

    A line counts with what it calls in libraries.
    """
    shares: dict[str, float] = {}
    for stack, share in profile.lines(rank, thread):
        users = own(stack)
        if users:
            shares[users[-1]] = shares.get(users[-1], 0.0) + share
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def own(stack: Sequence[str]) -> list[str]:
    """The calls of a stack that are in the user's own files."""
    return [call for call in stack if not is_library(call)]


def more_often(profile: RunProfile, rank: int, ranks: Iterable[int]) -> str:
    """The line at which a rank is seen more often than the others; "" if there is none.

    It is a line of the function with the largest difference. Where ranks differ in no function, as
    in a loop that waits for the others in the same one, it is the line with the largest difference.
    """
    mine = user_lines(profile, rank)
    others = [user_lines(profile, other) for other in ranks if other != rank]
    if not mine or not others:
        return ""
    functions = _by_function(mine)
    of_functions = {name: share for name, (share, _) in functions.items()}
    in_others = [
        {name: share for name, (share, _) in _by_function(lines).items()} for lines in others
    ]
    function, more = _largest_difference(of_functions, in_others)
    line = functions[function][1]
    if more < _NOT_MUCH:
        line, more = _largest_difference(mine, others)
    return f"; it spends {more:.0%} more of its time in {line}" if more >= _NOT_MUCH else ""


def _largest_difference(
    mine: Mapping[str, float], others: Sequence[Mapping[str, float]]
) -> tuple[str, float]:
    """Where a rank's share exceeds the median of the others' most, and by how much."""
    more = {
        name: share - median(shares.get(name, 0.0) for shares in others)
        for name, share in mine.items()
    }
    return max(more.items(), key=lambda item: item[1])


def waiting_line(profile: RunProfile, rank: int) -> str:
    """The user's line that makes batches in the main thread; "" if there is none."""
    shares: dict[str, float] = {}
    for stack, share in profile.lines(rank):
        loads = next((n for n, call in enumerate(stack) if _LOADER.search(call)), None)
        if loads is not None and (below := own(stack[loads:])):
            shares[below[-1]] = shares.get(below[-1], 0.0) + share
    return _most(shares, f"rank {rank} spends", "its")


def loader_line(profile: RunProfile, rank: int) -> str:
    """The user's line at which the DataLoader's processes are seen most; "" if there is none."""
    return _most(user_lines(profile, rank, "loader"), "the loader's processes spend", "their")


def busy_thread(profile: RunProfile, rank: int) -> tuple[float, str]:
    """What another thread does while the interpreter lock is not free.

    Returns:
        In which share of these moments a thread is seen in code that does not wait, and where: its
        most frequent line; ("" if there is none).
    """
    shares: dict[str, float] = {}
    for stack, share in profile.lines(rank, "others"):
        if stack and not _WAITS.search(stack[-1]):
            line = (own(stack) or stack)[-1]
            shares[line] = shares.get(line, 0.0) + share
    line = max(shares, key=lambda line: shares[line], default="")
    return sum(shares.values()), line


def _by_function(shares: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """By function, the share of all its lines, and the line with the most."""
    found: dict[str, tuple[float, str]] = {}
    for line, share in sorted(shares.items(), key=lambda item: -item[1]):
        place, _, name = line.rpartition(" ")
        function = f"{place.rpartition(':')[0]} {name}"
        total, first = found.get(function, (0.0, line))
        found[function] = total + share, first
    return found


def _most(shares: Mapping[str, float], spends: str, whose: str) -> str:
    share, line = max(_by_function(shares).values(), default=(0.0, ""))
    return f"; {spends} {share:.0%} of {whose} time in {line}" if share >= _NOT_MUCH else ""
