"""Which tests `make test` runs: the fast ones, and those that quick.txt lists with a reason."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

#: A test's id, to which pytest-xdist later adds the test's group.
NAME = pytest.StashKey[str]()
#: What the list names and collection did not find.
UNKNOWN = pytest.StashKey[list[str]]()
#: The suite that this process runs.
running = "all"
#: All of these are fast.
FAST = "tests/unit/"
LISTED = Path(__file__).parent / "quick.txt"


def quick_tests(path: Path = LISTED, section: str | None = None) -> list[str]:
    """The ids of the tests that a list names, a line each.

    An id without parameters stands for all of them, a file for its tests, and what follows a `#`
    is a comment.

    Args:
        path: the list.
        section: the heading, in brackets there, below which to look; None: all.
    """
    found = []
    heading = ""
    for line in path.read_text().splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text.startswith("["):
            heading = text.strip("[]")
        elif text and section in (None, heading):
            found.append(text)
    return found


def in_quick(nodeid: str, listed: Collection[str]) -> bool:
    """Whether `make test` runs a test, which is named as by pytest."""
    names = (nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0])
    return nodeid.startswith(FAST) or any(name in listed for name in names)
