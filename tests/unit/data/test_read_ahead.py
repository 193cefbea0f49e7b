"""Readahead: requests the file ranges of the wanted rows, and not much more."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner.data.feed.read_ahead import ReadAhead
from horovod_runner.data.pack.store import MatrixFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has posix_fadvise here")

ROWS = 40_000
_PART = 1 << 17
Ranges = dict[str, list[tuple[int, int]]]  # of bytes, by file name


@pytest.fixture
def files(tmp_path: Path) -> list[MatrixFile]:
    """Matrices with rows of 8, 72 and 3000 bytes."""
    files = [MatrixFile(tmp_path / str(size), ROWS, size) for size in (72, 8, 3000)]
    for path, rows, size in files:
        with path.open("wb") as file:
            file.truncate(rows * size)
    return files


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """The ranges requested from the system; no page is cached."""
    ranges = defaultdict(list)

    def advise(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        ranges[name].append((start, start + length))

    def preadv(*_: Any) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", preadv)
    return ranges


def test_each_part_of_a_matrix_that_fits_into_memory_is_requested_once(
    files: list[MatrixFile], requested: Ranges
) -> None:
    ahead = ReadAhead(files, 1 << 30)
    ahead.request(np.array([ROWS - 1]))
    assert {name: len(parts) for name, parts in requested.items()} == {"8": 1, "72": 1, "3000": 1}
    for _ in range(2):
        ahead.request(np.arange(ROWS))
    for _, rows, size in files:
        parts = requested[str(size)]
        assert sorted(parts) == [(n * _PART, (n + 1) * _PART) for n in range(len(parts))]
        assert len(parts) == -(-rows * size // _PART)


def test_of_a_matrix_larger_than_memory_only_wanted_rows_are_requested(
    files: list[MatrixFile], requested: Ranges
) -> None:
    ahead = ReadAhead(files, 10 << 20)  # the first two fit
    rows = np.array([ROWS - 1, 0, 1, 20_000, 2])
    for _ in range(2):  # the pages may have been evicted
        requested.clear()
        ahead.request(rows)
        parts = requested["3000"]
        assert len(parts) == 3
        assert sum(end - start for start, end in parts) <= 5 << 13
        for row in rows.tolist():
            assert any(s <= row * 3000 and (row + 1) * 3000 <= end for s, end in parts)
        if "8" in requested:
            assert requested["8"][0] == (0, _PART)
    assert set(requested) == {"3000"}


def test_rows_larger_than_a_part_are_requested_whole(tmp_path: Path, requested: Ranges) -> None:
    path, size = tmp_path / "wide", 5 * _PART
    path.touch()
    ReadAhead([MatrixFile(path, 10, size)], 1 << 30).request(np.array([7, 3]))
    assert requested["wide"] == [(3 * size, 4 * size), (7 * size, 8 * size)]


def test_cached_rows_are_not_requested(
    files: list[MatrixFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, *_ in files:
        path.read_bytes()
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("requested"))
    ReadAhead(files, 0).request(np.arange(ROWS))
