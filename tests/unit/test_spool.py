"""The message queue on a rank's host: order, memory limit, a full disk."""

from __future__ import annotations

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.wire.spool import Spool


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=200))
def test_items_come_out_in_order_across_memory_and_disk(actions: list[bytes | None]) -> None:
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


def test_a_small_item_does_not_overtake_items_on_disk() -> None:
    spool = Spool(memory=10)
    items = [bytes([number]) * 5 for number in range(6)]
    for item in items:
        spool.put(item)
    # Two are read back into memory, and one of them is taken.
    assert [spool.get() for _ in range(3)] == items[:3]
    spool.put(b"last")
    assert [spool.get() for _ in range(4)] == [*items[3:], b"last"]
    spool.close()


def test_the_memory_of_a_spool_is_bounded() -> None:
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


def test_a_full_disk_raises_and_keeps_the_other_items() -> None:
    def write_until_full(descriptor: int, data: bytes) -> None:
        """Writes like on a disk that is full after 100 bytes."""
        room = 100 - os.lseek(descriptor, 0, os.SEEK_CUR)
        os.write(descriptor, data[:room])
        if len(data) > room:
            raise OSError(28, "No space left on device")

    spool = Spool(memory=10, write=write_until_full)
    for item in (b"a" * 10, b"b" * 40, b"c" * 40):
        spool.put(item)
    with pytest.raises(OSError, match="No space left"):
        spool.put(b"d" * 40)
    spool.put(b"e" * 5)  # this fits
    expected = [b"a" * 10, b"b" * 40, b"c" * 40, b"e" * 5]
    assert [spool.get() for _ in expected] == expected
    spool.put(b"d" * 40)  # there is room again
    assert spool.get() == b"d" * 40
    spool.close()


def test_what_was_read_back_takes_no_room_on_the_disk() -> None:
    descriptors = set[int]()

    def write(descriptor: int, data: bytes) -> None:
        descriptors.add(descriptor)
        os.write(descriptor, data)

    spool, item, most = Spool(memory=1 << 20, write=write), bytes(64 << 10), 0
    for _ in range(64):
        spool.put(item)
    for _ in range(1000):  # 64 MB, through a queue of 4
        spool.put(item)
        assert spool.get() == item
        [descriptor] = descriptors
        most = max(most, os.fstat(descriptor).st_blocks * 512)
    assert most < 32 << 20
    spool.close()
