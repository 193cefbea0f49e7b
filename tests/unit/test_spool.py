"""The queue between a rank and the driver: order, bounds, a full disk."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.spool import Spool


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=200))
def test_first_in_first_out_across_memory_and_disk(actions: list[bytes | None]) -> None:
    spool, expected = Spool(memory=64), deque[bytes]()
    for item in actions:
        if item is not None:
            spool.put(item)
            expected.append(item)
        elif expected:
            assert spool.get() == expected.popleft()
        assert len(spool) == len(expected)
    while expected:
        assert spool.get() == expected.popleft()
    with pytest.raises(IndexError):
        spool.get()
    spool.close()


def test_what_waits_on_disk_is_not_overtaken_by_what_fits_into_memory() -> None:
    spool = Spool(memory=10)
    items = [bytes([number]) * 5 for number in range(6)]
    for item in items:
        spool.put(item)
    assert [spool.get() for _ in range(3)] == items[:3]  # two were read back, and one of them taken
    spool.put(b"last")
    assert [spool.get() for _ in range(4)] == [*items[3:], b"last"]
    spool.close()


def test_memory_stays_bounded() -> None:
    import tracemalloc

    spool, item = Spool(memory=1 << 20), bytes(64 << 10)
    tracemalloc.start()
    for _ in range(1000):  # 64 MB
        spool.put(bytes(item))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert sum(len(spool.get()) for _ in range(1000)) == 1000 * len(item)
    spool.close()


def test_a_full_disk_is_told_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        """A file on a disk that is full after 100 bytes; the real one stands behind it."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            room = 100 - self.file.tell()
            if not room:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data[:room]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    import tempfile

    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: FullDisk(real(**options)))
    spool = Spool(memory=10)
    for item in (b"a" * 10, b"b" * 40, b"c" * 40):
        spool.put(item)
    with pytest.raises(OSError, match="No space left"):
        spool.put(b"d" * 40)
    spool.put(b"e" * 5)  # for this there is room
    expected = [b"a" * 10, b"b" * 40, b"c" * 40, b"e" * 5]
    assert [spool.get() for _ in expected] == expected
    spool.put(b"d" * 40)  # there is room again
    assert spool.get() == b"d" * 40
    spool.close()
