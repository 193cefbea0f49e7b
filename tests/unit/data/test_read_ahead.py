"""What is asked for ahead: all that rows lie in, and not much else."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner.data.read_ahead import ReadAhead, memory_for_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")

ROWS = 40_000
_PART = 1 << 17


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[Path, int, int]]:
    """Matrices with rows of 8, 72 and 3000 bytes."""
    found = [(tmp_path / str(size), ROWS, size) for size in (72, 8, 3000)]
    for path, rows, size in found:
        with path.open("wb") as file:
            file.truncate(rows * size)
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """What the system was asked for, by the name of the file; nothing is in memory."""
    found = defaultdict(list)

    def advise(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        found[name].append((start, start + length))

    def preadv(*_: Any) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", preadv)
    return found


def test_each_part_of_what_memory_holds_is_asked_for_once(
    files: list[tuple[Path, int, int]], asked: dict[str, list[tuple[int, int]]]
) -> None:
    ahead = ReadAhead(files, 1 << 30)
    ahead.ask(np.array([ROWS - 1]))
    assert {name: len(parts) for name, parts in asked.items()} == {"8": 1, "72": 1, "3000": 1}
    for _ in range(2):
        ahead.ask(np.arange(ROWS))
    for _, rows, size in files:
        parts = asked[str(size)]
        assert sorted(parts) == [(n * _PART, (n + 1) * _PART) for n in range(len(parts))]
        assert len(parts) == -(-rows * size // _PART)


def test_of_what_memory_does_not_hold_only_what_rows_lie_in_is_asked_for(
    files: list[tuple[Path, int, int]], asked: dict[str, list[tuple[int, int]]]
) -> None:
    ahead = ReadAhead(files, 10 << 20)  # the first two fit
    rows = np.array([ROWS - 1, 0, 1, 20_000, 2])
    for _ in range(2):  # it may be gone again
        asked.clear()
        ahead.ask(rows)
        parts = asked["3000"]
        assert len(parts) == 3
        assert sum(end - start for start, end in parts) <= 5 << 13
        for row in rows.tolist():
            assert any(s <= row * 3000 and (row + 1) * 3000 <= end for s, end in parts)
        if "8" in asked:
            assert asked["8"][0] == (0, _PART)
    assert set(asked) == {"3000"}


def test_rows_that_are_larger_than_a_part_are_asked_for_whole(
    tmp_path: Path, asked: dict[str, list[tuple[int, int]]]
) -> None:
    path, size = tmp_path / "wide", 5 * _PART
    path.touch()
    ReadAhead([(path, 10, size)], 1 << 30).ask(np.array([7, 3]))
    assert asked["wide"] == [(3 * size, 4 * size), (7 * size, 8 * size)]


def test_what_is_in_memory_is_not_asked_for(
    files: list[tuple[Path, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, *_ in files:
        path.read_bytes()
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("asked for"))
    ReadAhead(files, 0).ask(np.arange(ROWS))


def test_a_container_has_the_memory_that_it_may_use() -> None:
    assert 0 < memory_for_files() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
