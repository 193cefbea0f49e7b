"""Which tests `make test` runs: the fast ones, and those that quick.txt lists with a reason."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

#: All of these are fast.
FAST = "tests/unit/"
LISTED = Path(__file__).parent / "quick.txt"


def quick_tests(path: Path = LISTED) -> list[str]:
    """The ids of the tests that a list names, a line each.

    An id without parameters stands for all of them. A line in brackets is a heading, and what
    follows a `#` is a comment.
    """
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("[")]


def in_quick(nodeid: str, listed: Collection[str]) -> bool:
    """Whether `make test` runs a test, which is named as by pytest."""
    return nodeid.startswith(FAST) or nodeid in listed or nodeid.partition("[")[0] in listed
